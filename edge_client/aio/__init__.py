"""`EdgeClient` for asyncio: heads and waiting in threads of its own, so that the event loop continues.

    from edge_client import aio

    async with aio.EdgeClient("127.0.0.1:50051", "digits", split="auto") as client:
        answer = await client.infer("photo.png")
        async for answer in client.infer_many("photos/"):
            ...

client   `EdgeClient`

May import client, call, answer.
"""

from edge_client.aio.client import EdgeClient

__all__ = ["EdgeClient"]
