"""Bounded staleness and nothing lost: the gate, the buffer that orders groups for the learner, and the journal."""

if __name__ == "buffers":
    raise ImportError("import this package as asyncrl.buffers")

from asyncrl.buffers.gate import Gate, GateStatistics
from asyncrl.buffers.group_commit import GroupCommit
from asyncrl.buffers.journal import Journal, JournalStatistics, read_journal
from asyncrl.buffers.journal_format import Damage, DamageKind, Record
from asyncrl.buffers.journal_settings import Fsync, JournalSettings, LostLine
from asyncrl.buffers.settings import BufferSettings
from asyncrl.buffers.windowed_fifo import BufferStatistics, WindowedFifo

__all__ = [
    "BufferSettings",
    "BufferStatistics",
    "Damage",
    "DamageKind",
    "Fsync",
    "Gate",
    "GateStatistics",
    "GroupCommit",
    "Journal",
    "JournalSettings",
    "JournalStatistics",
    "LostLine",
    "Record",
    "WindowedFifo",
    "read_journal",
]
