"""The models of a server: placed on devices, loaded, replaced and unloaded while it runs.

fleet    the models by name
version  one model with one set of weights, and what keeps them in memory
hosts    where models are loaded: in this process, or in worker processes
on_devices  one model on several devices: copies of it, or its parts

May import models, processes, entries, config, limits.
"""

from cloud_server.fleet.fleet import Fleet, freeze
from cloud_server.fleet.hosts import Host, Processes, ThisProcess, devices_of, placed
from cloud_server.fleet.version import Version

__all__ = [
    "Fleet",
    "Host",
    "Processes",
    "ThisProcess",
    "Version",
    "devices_of",
    "freeze",
    "placed",
]
