"""A client that knows nothing of Isthmus: NVIDIA's, from the registry, in the same process as the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_client.inference import INPUT, tail_request
from shared_hooks import WrappedModel
from tests.cloud_server.inference.served import engine, serving
from tests.cloud_server.real import Residual

triton = pytest.importorskip("tritonclient.grpc")
MODEL = Residual().eval()


def test_models_metadata_and_answers() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = MODEL(x)["logits"]
    with serving(engine()) as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("residual")
        assert [one.name for one in client.get_model_repository_index().models] == ["residual"]
        assert list(client.get_model_metadata("residual").inputs[0].shape) == [-1, 8]
        assert client.get_model_config("residual").config.input[0].name == "x"
        given = triton.InferInput("x", [3, 8], "FP32")
        given.set_data_from_numpy(x.numpy())
        answer = client.infer("residual", [given], request_id="7")
        assert answer.get_response().id == "7"
        assert torch.equal(torch.from_numpy(answer.as_numpy("logits").copy()), wanted)
        (counted,) = client.get_inference_statistics("residual").model_stats
        assert counted.inference_count == 1 and counted.inference_stats.success.ns > 0
        with WrappedModel(Residual().eval()) as edge:
            data, parameters = tail_request(edge, "residual", edge.head("second", x))
        crosses = triton.InferInput(INPUT, [len(data)], "UINT8")
        crosses.set_data_from_numpy(data)
        answer = client.infer("residual", [crosses], parameters=parameters)
        assert np.array_equal(answer.as_numpy("logits"), wanted.numpy())
