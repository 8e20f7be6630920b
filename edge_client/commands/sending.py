"""The options of the commands that send inputs: run, watch and dashboard."""

from __future__ import annotations

import argparse

from edge_client.commands.common import CHOOSES, Commands, add_codec, add_config, add_losses, add_observe, add_sink
from edge_client.commands.credentials import add_credentials
from edge_client.commands.kinds import count as _count
from edge_client.commands.kinds import number as _number
from edge_client.commands.kinds import pixels as _pixels
from edge_client.commands.kinds import rate as _rate
from edge_client.commands.kinds import seconds as _seconds
from edge_client.commands.kinds import share as _share
from edge_client.commands.server import add_server
from shared_hooks.command_line import Parser

PORT = "8050"
"""Of the dashboard, where none is given."""


def add_run(commands: Commands, model: Parser) -> None:
    run = commands.add_parser("run", parents=[model], help="send inputs through a cut")
    watch = commands.add_parser("watch", parents=[model], help="send inputs, and show live what observers see")
    for command in (run, watch):
        add_config(command)
        add_credentials(command)
        add_observe(command, default=("activation", "debug") if command is watch else ())
    run.add_argument("--heat-maps", metavar="DIR", help="with --observe attention: pictures of it, as PNG files")
    add_server(watch)
    watch.add_argument("--split", required=True, metavar="LAYER_ID|NAME|input|...", help="same as run, without auto")
    watch.add_argument("--input", action="extend", nargs="+", required=True, metavar="PATH", help="same as run")
    watch.add_argument("--repeat", type=_count, default=1, metavar="N", help="repeat all inputs N times (default: 1)")
    add_server(run)
    run.add_argument(
        "--split",
        required=True,
        metavar="LAYER_ID|NAME|input|edge-only|cloud-only|cloud-only-file|auto",
        help='cut after this layer (a name is tried before an id); "edge-only" needs no server; "cloud-only" sends the '
        'input, "cloud-only-file" the file as it is; "auto" chooses the cut and moves it as link and load change',
    )
    run.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        metavar="PATH",
        help="an image, .npy, .safetensors, a folder, a glob, a video; or several, each as often as given. Or one "
        "camera: a device as /dev/video0, an address as rtsp://...",
    )
    run.add_argument("--frames", type=_count, metavar="N", help="of a video or a camera: end after N frames")
    run.add_argument(
        "--queue", type=_count, metavar="N", help="of a camera: frames that wait; the oldest gives way (default: 2)"
    )
    run.add_argument("--camera-size", type=_pixels, metavar="WxH", help="asked of a device, such as 640x480")
    run.add_argument("--camera-rate", type=_rate, metavar="N", help="asked of a device: frames a second")
    run.add_argument("--camera-format", metavar="NAME", help="asked of a device: its pixel format, such as mjpeg")
    run.add_argument(
        "--only-head",
        metavar="LAYER_ID|NAME",
        help="load only the weights of heads that end here or before; the others stay in their files",
    )
    run.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    run.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
    run.add_argument(
        "--in-flight", type=_count, default=1, metavar="N", help="requests under way, for throughput (default: 1)"
    )
    run.add_argument(
        "--warmup", type=_number, default=0, metavar="N", help="requests of the first input before all, not counted"
    )
    run.add_argument(
        "--save",
        metavar="DIR",
        help="keep outputs: JSON, large tensors as safetensors, drawn where the spec says how",
    )
    add_codec(run, auto=CHOOSES)
    add_losses(run)
    run.add_argument(
        "--witness",
        type=_share,
        default=0.0,
        metavar="P",
        help="also compute this share of the split inputs whole on the edge, and compare: 0 to 1 (default: 0)",
    )
    run.add_argument(
        "--journal", metavar="FILE", help="keep what became of each input; the same command goes on where it stopped"
    )
    run.add_argument(
        "--fallback",
        choices=("edge",),
        help="answer on the edge what the server does not: gone, other weights, refused",
    )
    run.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-exact: the server may compute inputs in batches with other clients'; last bits then differ",
    )
    run.add_argument("--layers", action="store_true", help="print each layer's time on both sides")
    run.add_argument(
        "--dashboard",
        nargs="?",
        const=PORT,
        metavar="[HOST:]PORT",
        help=f"serve a page that shows this run, live, as long as it goes (alone: {PORT}, of 127.0.0.1)",
    )
    add_sink(run)
    _add_auto(run)


def add_dashboard(commands: Commands, model: Parser) -> None:
    page = commands.add_parser(
        "dashboard", parents=[model], help="a page in the browser that shows requests, link, cuts and machines, live"
    )
    page.add_argument(
        "--listen",
        default=PORT,
        metavar="[HOST:]PORT",
        help=f"of the page; 0 = any free one (default: {PORT}, of 127.0.0.1)",
    )
    add_server(page)
    add_credentials(page)
    page.add_argument(
        "--input", action="extend", nargs="+", metavar="PATH", help="same as run; without, the server is watched"
    )
    page.add_argument("--split", default="auto", metavar="LAYER_ID|NAME|auto|...", help="same as run (default: auto)")
    page.add_argument(
        "--every", type=_seconds, default=0.2, metavar="S", help="begin a request every S seconds (default: 0.2)"
    )
    page.add_argument("--repeat", type=_count, metavar="N", help="all inputs N times (default: until Ctrl-C)")
    page.add_argument("--deadline", type=_seconds, default=60.0, metavar="S", help="for each request (default: 60)")
    page.add_argument("--patience", type=_seconds, default=15.0, metavar="S", help="wait for a server (default: 15)")
    add_codec(page, auto=CHOOSES)
    add_losses(page)
    add_observe(page)
    add_sink(page)
    add_config(page)
    _add_auto(page)


def _add_auto(run: argparse.ArgumentParser) -> None:
    auto = run.add_argument_group("--split auto")
    auto.add_argument("--objective", default="latency", metavar="NAME|NAME=WEIGHT,...", help="(default: latency)")
    auto.add_argument("--max-edge-memory", metavar="SIZE", help="such as 64MiB: limit on the edge, weights included")
    auto.add_argument("--max-bytes-per-second", metavar="SIZE", help="such as 500kB: limit for both ways, at --rate")
    auto.add_argument("--rate", type=_rate, metavar="N", help="requests per second")
    auto.add_argument("--min-accuracy", type=float, metavar="X", help="agreement with the whole model, 0 to 1")
    auto.add_argument("--edge-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    auto.add_argument("--cloud-profile", metavar="FILE", help="made by edge-client profile (default: measured now)")
    auto.add_argument(
        "--profile-seconds", type=_seconds, default=5.0, metavar="S", help="for each profile (default: 5)"
    )
    auto.add_argument("--partitioner", default="objective", metavar="NAME", help="what decides (default: objective)")
    auto.add_argument("--partitioner-option", metavar="TEXT", help="passed to the partitioner")
    auto.add_argument("--log-decisions", metavar="FILE", help="write every decision and its numbers as lines of JSON")
