"""The results as Markdown, as they stand in docs/ray.md."""

from __future__ import annotations

from typing import Any

WAYS = {
    "plain": "one process",
    "ray": "behind a front",
    "plain_beside_proxy": "one process, beside the proxy",
    "proxy": "Ray Serve's own proxy",
}
"""In turns: the first with the second, the third with the fourth."""


def table(result: dict[str, Any]) -> str:
    lines: list[str] = []
    if result.get("latency"):
        ways = [way for way in WAYS if way in result["latency"][0]]
        lines += [
            "| each way | " + " | ".join(f"{WAYS[way]}: median / p95 ms" for way in ways) + " |",
            "|---|" + "---|" * len(ways),
        ]
        for row in result["latency"]:
            cells = [f"{row[way]['median']:.2f} / {row[way]['p95']:.2f}" for way in ways]
            lines.append(f"| {row['bytes'] >> 10} KiB | " + " | ".join(cells) + " |")
        lines.append("")
    if result.get("throughput"):
        lines += ["| server | answers a second | against one worker | lost | wrong |", "|---|---|---|---|---|"]
        for row in result["throughput"]:
            lines.append(
                f"| {row['server']} | {row['answers_per_second']:.1f} | {row['times_one']:.2f} | {row['lost']} "
                f"| {row['wrong']} |"
            )
        lines.append("")
    if result.get("killed"):
        lines += [
            "| what happens | replicas, fronts | times | asked | lost | wrong | sent again "
            "| without service: median / max s | all there again s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in result["killed"]:
            lines.append(
                f"| {row['fault']} | {row['replicas']}, {row['fronts']} | {row['times']} | {row['asked']:,} "
                f"| {row['lost']} | {row['wrong']} | {row['sent_again']} | {row['without_service_median']:.2f} / "
                f"{row['without_service_max']:.2f} | {row['whole_again_max']:.1f} |"
            )
    return "\n".join(lines)
