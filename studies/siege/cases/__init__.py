"""What a hostile client does, a function each; every message is valid. ``CASES`` has them by name.

registry    how a case is registered
silence     announces and waits: places and bytes that nobody uses
sizes       small messages that become large
kept        what a server keeps
work        what takes a worker's time
others      other clients' requests, and the log
departures  comings and goings
"""

from studies.siege.cases import departures, kept, others, silence, sizes, work
from studies.siege.cases.registry import CASES, Case

__all__ = ["CASES", "Case", "departures", "kept", "others", "silence", "sizes", "work"]
