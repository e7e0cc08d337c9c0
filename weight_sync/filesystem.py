"""Weights through a directory that learner and engines share: the file is on disk before its manifest appears."""

from __future__ import annotations

from asyncrl.weight_sync.publisher import FilePublisher


class FilesystemPublisher(FilePublisher):
    """The learner's half; as `SharedMemoryPublisher`, but each file is fsynced before its manifest is renamed."""

    transport = "filesystem"
    durable = True
