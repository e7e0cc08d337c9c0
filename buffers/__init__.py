"""Bounded staleness and nothing lost: the gate, the buffer that orders groups, the books, and the journal."""

if __name__ == "buffers":
    raise ImportError("import this package as asyncrl.buffers")

from asyncrl.buffers.accounting import DISCARDED, LOST, RETRIED, Amount, Ledger, Statement
from asyncrl.buffers.gate import Gate, GateStatistics
from asyncrl.buffers.group_buffer import BufferStatistics, GroupBuffer, UsedUp, Wait
from asyncrl.buffers.group_commit import GroupCommit
from asyncrl.buffers.journal import Journal, JournalStatistics, read_journal
from asyncrl.buffers.journal_format import Damage, DamageKind, Record
from asyncrl.buffers.journal_settings import Fsync, JournalSettings, LostLine
from asyncrl.buffers.ordering import Candidate, Choice, Order, choose
from asyncrl.buffers.selection import EpisodeFigures, SelectionStatistics, Stage
from asyncrl.buffers.settings import BufferSettings

__all__ = [
    "DISCARDED",
    "LOST",
    "RETRIED",
    "Amount",
    "BufferSettings",
    "BufferStatistics",
    "Candidate",
    "Choice",
    "Damage",
    "DamageKind",
    "EpisodeFigures",
    "Fsync",
    "Gate",
    "GateStatistics",
    "GroupBuffer",
    "GroupCommit",
    "Journal",
    "JournalSettings",
    "JournalStatistics",
    "Ledger",
    "LostLine",
    "Order",
    "Record",
    "SelectionStatistics",
    "Stage",
    "Statement",
    "UsedUp",
    "Wait",
    "choose",
    "read_journal",
]
