"""The models of a server: placed on devices, loaded, replaced and unloaded while it runs.

fleet       the models by name
room        what is evicted where memory is full
version     one model with one set of weights: there, or not
pins        what keeps weights in memory
hosts       where models are loaded: in this process, or in worker processes
placing     which model on which devices
replicated  one model on several of them

May import models, processes, entries, config, limits.
"""

from cloud_server.fleet.fleet import Fleet, freeze
from cloud_server.fleet.hosts import Host, Processes, ThisProcess
from cloud_server.fleet.placing import devices_of
from cloud_server.fleet.version import Version

__all__ = [
    "Fleet",
    "Host",
    "Processes",
    "ThisProcess",
    "Version",
    "devices_of",
    "freeze",
]
