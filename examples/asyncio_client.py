"""Many requests at once from one thread: answers come in order, and what nobody waits for is cancelled on the server.

cloud-server --model digits &
python examples/asyncio_client.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from edge_client.aio import EdgeClient

IMAGES = sorted(Path("shared_hooks/models/digits/images").glob("*.png"))


async def main(server: str) -> None:
    async with EdgeClient(server, "digits", split="stage2.0.conv2") as client:
        answer = await client.infer(IMAGES[0])
        print(IMAGES[0].name, "is", answer.result[0].label)

        several = await asyncio.gather(*(client.infer(image) for image in IMAGES[:8]))
        print("at once:", " ".join(answer.result[0].label for answer in several))

        right = 0
        async for answer, image in each(client, IMAGES):
            right += answer.result[0].label == image.stem[-1]
        print(f"one after the other: {right} of {len(IMAGES)} right")


async def each(client: EdgeClient, images: list[Path]):
    """Each answer with its image."""
    waiting = iter(images)
    async for answer in client.infer_many(images):
        yield answer, next(waiting)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    asyncio.run(main(parser.parse_args().server))
