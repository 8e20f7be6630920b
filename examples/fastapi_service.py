"""A web service in front of a split model: a picture in, predictions out.

cloud-server --model digits &
ISTHMUS_SERVER=127.0.0.1:50051 uvicorn examples.fastapi_service:app
curl 127.0.0.1:8000/predict --data-binary @shared_hooks/models/digits/images/1728_label7.png
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request

from edge_client import Answer
from edge_client.aio import EdgeClient
from shared_hooks.errors import InputMismatch, IsthmusError, ModelFailed

LARGEST = 16 << 20
"""Bytes of a body."""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the whole service: it plans and connects once, and any number of requests share it."""
    server = os.environ.get("ISTHMUS_SERVER", "127.0.0.1:50051")
    async with EdgeClient(server, "digits", split="stage2.0.conv2", fallback="edge") as app.state.client:
        yield


app = FastAPI(lifespan=lifespan)


async def while_wanted(request: Request, work: Awaitable[Answer]) -> Answer:
    """What ``work`` gives. When the caller leaves it is cancelled, here and on the cloud server."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the caller left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


@app.post("/predict")
async def predict(request: Request) -> dict[str, object]:
    """The body is a picture's file. 400: it is none, or the model fails on it. 503: nobody could answer."""
    if int(request.headers.get("content-length", LARGEST + 1)) > LARGEST:
        raise HTTPException(413, f"more than {LARGEST} bytes, or of unknown length")
    try:
        picture = await request.body()
        answer = await while_wanted(request, request.app.state.client.infer(picture))
    except (InputMismatch, ModelFailed) as error:
        raise HTTPException(400, str(error)) from error
    except IsthmusError as error:
        raise HTTPException(503, str(error)) from error
    return {
        "predictions": {one.label: round(one.score, 4) for one in answer.result},
        "split": answer.split,
        "milliseconds": answer.measured_ns / 1e6,
    }
