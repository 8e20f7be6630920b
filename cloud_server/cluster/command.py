"""``cloud-server --on ray``: starts Ray on this machine, or joins it at RAY_ADDRESS. Everything is up when "listening
on ..." is printed. SIGTERM and Ctrl-C drain everything; SIGHUP deploys the files' current content.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from cloud_server.cluster import passport
from cloud_server.config import ServerConfig
from cloud_server.transport import check_free
from shared_hooks.errors import IsthmusError, ModelFailed, SpecError, by_name

if TYPE_CHECKING:
    from cloud_server.cluster.application import Start

log = logging.getLogger("cloud_server")

OK, CUT_SHORT = 0, 3
APPLICATION: Final = "isthmus"
MISSING: Final = '--on ray needs Ray Serve: pip install "isthmus[ray]"'
OBJECT_STORE_BYTES: Final = 80 << 20
"""What Ray reserves for its objects, at least 75 MiB; requests are none."""
ANSWER_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 2.0
_REASON: Final = re.compile(r"^(?:ray\.exceptions\.\w+: )?(?:\w+\.)*errors\.(\w+): (.+)$", re.MULTILINE)
"""One of this package's errors as a traceback's last line."""


def check_installed() -> None:
    """Raise SpecError without Ray. Does not load it, because Ray reads the environment then (`_settle`)."""
    if importlib.util.find_spec("ray") is None:
        raise SpecError(MISSING)


def serve_on_ray(config: ServerConfig, words: Sequence[str]) -> int:
    """Serve until a signal comes; returns the exit status. ``words``: the command line, for other processes."""
    passport.check(config)
    check_installed()
    address = os.environ.get("RAY_ADDRESS", "")
    _settle(config, alone=not address)
    try:
        import ray
        from ray import serve

        from cloud_server.cluster.application import FRONT, Start
    except ImportError as error:  # Ray alone, without the dependencies of Ray Serve
        raise SpecError(f"{MISSING} ({error})") from error

    try:
        if address:
            ray.init(address=address, namespace=APPLICATION, logging_level=logging.WARNING)
        else:
            ray.init(
                address="local",
                num_cpus=_cpus(config),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                namespace=APPLICATION,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SpecError(f"Ray cannot be {'joined at ' + address if address else 'started'}: {error}") from error
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: signals.put(received))
    try:
        start = Start(tuple(words), os.getcwd())
        _deploy(config, start)
        front: Any = serve.get_deployment_handle(FRONT, APPLICATION)
        print(f"listening on {front.address.remote().result(timeout_s=config.scale.start_seconds)}", flush=True)
        while (received := _wait(signals)) == signal.SIGHUP:
            _deploy_again(start)
        log.info("%s", signal.Signals(received).name)
        status = _down(signals)
    finally:
        if not address:
            serve.shutdown()
        ray.shutdown()
    return status


def _check_answers(address: str) -> None:
    """Raise SpecError if there is no server at ``HOST:PORT``; Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not (host and port.isdigit()):
        return  # Ray's other ways to give an address
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SpecError(
            f"RAY_ADDRESS={address}: no cluster is there ({error}); `ray start --head` starts one"
        ) from None


def _cpus(config: ServerConfig) -> int:
    """Return the processors for all replicas, including those during an update. Ray does not check them against the
    machine.
    """
    most = config.scale.max_replicas
    return math.ceil(config.scale.cpus * len(config.models) * (most + math.ceil(most / 5))) + 1


def _settle(config: ServerConfig, *, alone: bool) -> None:
    """Set what Ray reads from the environment, before it is loaded. Raises SpecError."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled" and not config.insecure:
        raise SpecError(
            "RAY_AUTH_MODE=disabled: any client of a port of Ray's runs code here. Leave it out (Ray then asks for a "
            "token), or give --insecure if every machine on that network is trusted"
        )
    # Ray Serve's own log is in files (/tmp/ray/session_latest/logs/serve); ours stays on standard error.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    if not alone:
        _check_answers(os.environ["RAY_ADDRESS"])
    else:
        # Ray's name for "one machine, loopback only", which works on every system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        check_free(config.listen)
        if config.metrics:
            try:
                check_free(config.metrics)
            except SpecError as error:
                raise SpecError(str(error).replace("listen:", "metrics:", 1)) from error


def _deploy(config: ServerConfig, start: Start) -> None:
    """Deploy ``config`` and wait until everything is up. Raises the error of a replica that could not start."""
    from ray import serve

    from cloud_server.cluster.application import build

    serve.start(proxy_location="Disabled")  # Ray Serve's own proxies: docs/decisions/0016-ray-serve.md
    failed: list[BaseException] = []

    def run() -> None:
        try:
            serve.run(build(config, start), name=APPLICATION, route_prefix=None)
        except BaseException as error:
            failed.append(error)

    # serve.run waits for replicas without a limit; here it has one.
    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(config.scale.start_seconds)
    if running.is_alive() or failed:
        raise _why(failed[0] if failed else None, config.scale.start_seconds)


def _deploy_again(start: Start) -> None:
    """A rolling update: replicas and fronts whose files have changed are replaced one by one."""
    log.info("deploying again")
    try:
        config = start.read()
        config.check_access()
        _deploy(config, start)
        log.info("deployed")
    except IsthmusError as error:
        log.error("%s: %s; what could not be replaced stays as it was", type(error).__name__, error)


def _why(error: BaseException | None, seconds: float) -> IsthmusError:
    """Return why a replica could not start, according to Ray Serve."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    reported = (
        [] if application is None else [application.message, *(d.message for d in application.deployments.values())]
    )
    for text in reported:
        found = _REASON.findall(text)
        if found:
            name, message = found[-1]
            return by_name(name)(message)
    if error is not None:
        return ModelFailed(f"Ray Serve could not start it: {error}")
    more = "; ".join(filter(None, reported))
    return ModelFailed(f"not everything was up after {seconds:g} s (ray.start_seconds): {more}")


def _wait(signals: queue.SimpleQueue[int]) -> int:
    """Wait for a signal, and log changes of the replicas' state."""
    from ray import serve

    reported = "RUNNING"
    while True:
        try:
            return signals.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            pass
        application = serve.status().applications.get(APPLICATION)
        status = "gone" if application is None else str(application.status.value)
        if status != reported:
            log.warning("%s is %s%s", APPLICATION, status, f": {application.message}" if application else "")
            reported = status


def _down(signals: queue.SimpleQueue[int]) -> int:
    """Drain replicas and fronts; returns the exit status."""
    from ray import serve

    deleting = threading.Thread(target=lambda: serve.delete(APPLICATION), daemon=True)
    deleting.start()
    while deleting.is_alive():
        deleting.join(0.1)
        if not signals.empty():
            logging.shutdown()
            sys.stdout.flush()
            os._exit(CUT_SHORT)
    return OK
