"""Bounded staleness: the gate that admits groups, and the buffer that orders them for the learner."""

if __name__ == "buffers":
    raise ImportError("import this package as asyncrl.buffers")

from asyncrl.buffers.gate import Gate, GateStatistics
from asyncrl.buffers.settings import BufferSettings
from asyncrl.buffers.windowed_fifo import BufferStatistics, WindowedFifo

__all__ = ["BufferSettings", "BufferStatistics", "Gate", "GateStatistics", "WindowedFifo"]
