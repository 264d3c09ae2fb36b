"""The engine as a child process: its loop, the messages to and from it, and its clients."""

from naiad.engine_process.acks import Ack, AckReceiver, AckRouter, AckSender
from naiad.engine_process.clients.attached_client import AttachedClient
from naiad.engine_process.clients.engine_client import ClientTimings, EngineClient
from naiad.engine_process.clients.stop_notice import StopNotice
from naiad.engine_process.file_lock import FileLock
from naiad.engine_process.instance import Instance, claim_instance
from naiad.engine_process.place import Place
from naiad.engine_process.protocol import Ready
from naiad.engine_process.runtime_dir import remove_runtime_directory, runtime_directory, runtime_path

__all__ = [
    "Ack",
    "AckReceiver",
    "AckRouter",
    "AckSender",
    "AttachedClient",
    "ClientTimings",
    "EngineClient",
    "FileLock",
    "Instance",
    "Place",
    "Ready",
    "StopNotice",
    "claim_instance",
    "remove_runtime_directory",
    "runtime_directory",
    "runtime_path",
]
