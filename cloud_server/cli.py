"""The ``cloud-server`` command: read what to serve, serve it, drain on SIGTERM or Ctrl-C.

Exit status: 0 after draining, 1 when the server could not start or broke, 2 for a wrong command line or configuration,
3 when it ended before every running request was answered (a second signal, or the time limit), 130 for Ctrl-C before it
was up.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext

from cloud_server.access import Register
from cloud_server.arguments import parser
from cloud_server.chain import Chain
from cloud_server.cluster.command import serve_on_ray
from cloud_server.config import ModelEntry, ServerConfig, configure
from cloud_server.core import Core
from cloud_server.fleet import Fleet, Processes, ThisProcess, freeze, placed
from cloud_server.processes import Trials
from cloud_server.scheduling import few_heaps
from cloud_server.telemetry import MetricsPage, measured, traced
from cloud_server.transport import CloudServer, check_free
from shared_hooks.errors import IsthmusError, SpecError, UnknownModel
from shared_hooks.lifecycle import Stage
from shared_hooks.lifecycle.log import LogBounds, show
from shared_hooks.lifecycle.registry import is_default, lines
from shared_hooks.models import set_threads

log = logging.getLogger("cloud_server")

OK, FAILED, USAGE, CUT_SHORT = 0, 1, 2, 3

GRACE_SECONDS = 2.0
"""How long clients may take to fetch the last answers and leave."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    few_heaps()
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(words)
    bounds = show(options.log_level, options.log_format)
    try:
        config = configure(options)
        bounds.each, bounds.together = config.limits.log_lines_per_account, config.limits.log_lines_per_minute
        if options.hooks:
            print("\n".join(lines(config.lifecycle)))
            return OK
        if options.on == "ray":
            return serve_on_ray(config, words)
        return serve(config, words, bounds)
    except (SpecError, UnknownModel) as error:
        print(f"cloud-server: {error}", file=sys.stderr)
        return USAGE
    except IsthmusError as error:
        print(f"cloud-server: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"cloud-server: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED


def serve(config: ServerConfig, words: Sequence[str], bounds: LogBounds) -> int:
    """Serve until a signal comes; returns the exit status.

    ``words``: the command line, for worker processes. ``bounds``: of the log.
    """
    page = MetricsPage(config.metrics) if config.metrics else nullcontext()
    with page as taken, traced(config.lifecycle, config.tracing):
        return _serve(config, words, bounds, taken)


def _serve(config: ServerConfig, words: Sequence[str], bounds: LogBounds, page: MetricsPage | None) -> int:
    for address in filter(None, (config.listen, config.rest)):
        check_free(address, config.reuse_port)
    gc.freeze()  # imported modules stay: the collection below examines only what loading left
    divided = config.tensor_parallel > 1
    devices = max((placed(entry, config.device, divided=divided) for entry in config.models), key=len)
    threads, lifecycle = set_threads(config.threads), config.lifecycle
    with ExitStack() as stack:
        pools = stack.enter_context(Processes(config, words)) if config.in_processes else None
        trials = Trials(words, config.trials, config.limits.max_trial_seconds)
        stack.callback(trials.close)
        fleet = Fleet(pools or ThisProcess(config), config.models, _reader(words), freeze, config.limits, trials)
        stack.callback(fleet.close)
        workers = config.workers * len(devices)
        chain = Chain(config.next, config.limits) if config.next else None
        core = stack.enter_context(Core(fleet, config.limits, workers, config.observers, lifecycle, chain))
        totals = {
            "worker_restarts": lambda: pools.deaths if pools else 0,
            "log_lines_left_out": lambda: bounds.left_out,
        }
        stack.enter_context(measured(core, page, totals))
        certificates = config.tls is not None and config.tls.client_ca is not None
        server = CloudServer(
            core,
            config.listen,
            config.tls,
            register=Register(config.identities, certificates=certificates, trusted=config.trusted),
            reflection=config.reflection,
            reuse_port=config.reuse_port,
            rest=config.rest,
            pages=config.pages,
        )
        if pools:
            pools.on_warm = server.serving
        # A signal handler may only do what is safe inside any other call of the main thread; SimpleQueue.put is.
        signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: signals.put(received))
        gc.collect()
        gc.freeze()
        lifecycle.emit(Stage.BEFORE_RUN, address=config.listen)
        server.start()
        if pools and not pools.warm:  # all workers of a pool have ended meanwhile
            server.serving(False)
        log.info("%d threads, %d worker%s", threads, workers, " process(es)" if pools else "(s)")
        host = config.listen.rpartition(":")[0]
        print(f"listening on {host}:{server.port}", flush=True)
        log.info("%s", signal.Signals(_end_of(signals, fleet)).name)
        server.drain()
        drained = _wait(core, signals, config.limits.drain_seconds)
        core.drained(drained)
        server.stop(GRACE_SECONDS if drained else 0)
        lifecycle.emit(Stage.AFTER_RUN, address=config.listen)
    if not is_default(lifecycle):
        print("hooks:", *lines(lifecycle), sep="\n", file=sys.stderr, flush=True)
    abandoned = core.requests.running
    status = OK if drained else CUT_SHORT
    if abandoned or not drained:
        # A tail still runs, perhaps for a client that has left; neither it nor the interpreter's wait for its threads
        # can be interrupted. Worker processes have been ended.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def _end_of(signals: queue.SimpleQueue[int], fleet: Fleet) -> int:
    """Wait for a signal that ends the server.

    SIGHUP reloads the models, unless it means that the terminal was closed.
    """
    attended = os.isatty(0)
    while (number := signals.get()) == signal.SIGHUP and not (attended and not os.isatty(0)):
        threading.Thread(target=_reload, args=(fleet,), name="isthmus-reload", daemon=True).start()
    return number


def _reader(words: Sequence[str]) -> Callable[[], Sequence[ModelEntry]]:
    """Returns a function that reads the models from the command line and its files."""
    return lambda: configure(parser().parse_args(words)).models


def _reload(fleet: Fleet) -> None:
    try:
        log.info("SIGHUP: %s", fleet.reload())
    except Exception as error:  # a model's own code may raise anything
        log.error("SIGHUP: nothing was changed: %s: %s", type(error).__name__, error)


def _wait(core: Core, signals: queue.SimpleQueue[int], seconds: float) -> bool:
    """Wait for running requests; returns False if a second signal or the time limit comes first."""
    limit = time.monotonic() + seconds
    while not core.wait_idle(0.1):
        if not signals.empty() or time.monotonic() > limit:
            return False
    return True
