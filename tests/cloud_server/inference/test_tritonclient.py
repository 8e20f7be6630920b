"""A client that knows nothing of Isthmus: NVIDIA's, from the registry, in the same process as the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cloud_server.inference.served import crossing, engine, serving
from tests.cloud_server.real import Residual

triton = pytest.importorskip("tritonclient.grpc")
MODEL = Residual().eval()


def test_models_metadata_and_answers() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = MODEL(x)["logits"]
    with (
        serving(engine(tails=("second",))) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
    ):
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("residual")
        assert [one.name for one in client.get_model_repository_index().models] == ["residual", "residual@second"]
        assert list(client.get_model_metadata("residual").inputs[0].shape) == [-1, 8]
        assert client.get_model_config("residual").config.input[0].name == "x"
        given = triton.InferInput("x", [3, 8], "FP32")
        given.set_data_from_numpy(x.numpy())
        answer = client.infer("residual", [given], request_id="7")
        assert answer.get_response().id == "7"
        assert torch.equal(torch.from_numpy(answer.as_numpy("logits").copy()), wanted)
        (counted,) = client.get_inference_statistics("residual").model_stats
        assert counted.inference_count == 1 and counted.inference_stats.success.ns > 0
        inputs = []
        for name, value in crossing(MODEL, "second", x).items():
            inputs.append(triton.InferInput(name, list(value.shape), "FP32"))
            inputs[-1].set_data_from_numpy(value.numpy())
        answer = client.infer("residual@second", inputs)
        assert np.array_equal(answer.as_numpy("logits"), wanted.numpy())
