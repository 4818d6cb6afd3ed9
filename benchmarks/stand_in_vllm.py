"""A server that speaks as much of vLLM's interface as training uses, and fails on demand.

    python benchmarks/stand_in_vllm.py --port 8000 --rank 8

For tests, and for benchmarks of what happens around a server where there is no vLLM.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.engine.vllm.vllm_client import WeightCheck
from groupwise.model.load import load_policy
from groupwise.records import Request, Sampling, derive_seed


class StandIn:
    """Answers with the built-in model; `mood` decides how well.

    well · dead (closes every connection) · hanging · broken (500) · stale (takes adapters and ignores them) ·
    forgetful (has lost its adapters, once)
    """

    def __init__(self, *, rank: int = 4, version: str = "0.32.0", raw: bool = False, port: int = 0) -> None:
        lora = LoraConfig(r=rank)
        self.policy = load_policy(ModelConfig(name="tiny", device="cpu", dtype="float32"), lora)
        self.engine = Engine(self.policy, EngineConfig())
        self.version, self.raw = version, raw
        self.mood = "well"
        self.loaded: list[str] = []
        self.asked = 0
        """Groups that were asked for."""
        self.under_way = 0
        """Requests that are being answered."""
        self.lock = threading.Lock()
        handler = type("Bound", (Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def get(self, path: str) -> Any:
        if path == "/health":
            return {}
        if path == "/metrics":
            return f"vllm:num_requests_running{{}} {float(self.under_way)}"
        if path == "/version":
            return {"version": self.version}
        if path == "/openapi.json":
            return {"paths": {"/v1/load_lora_adapter": {}, "/collective_rpc": {}}}
        return {"data": [{"id": name} for name in ("policy", *self.loaded)]}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.loaded:
                return refusal(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            self.loaded.append(body["lora_name"])
            if self.mood != "stale":
                tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
                set_peft_model_state_dict(self.policy.model, tensors)
            return {}
        if path == "/v1/unload_lora_adapter":
            if body["lora_name"] not in self.loaded:
                return refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            self.loaded.remove(body["lora_name"])
            return {}
        if self.mood == "forgetful":
            self.loaded, self.mood = [], "well"
        if body["model"] not in ("policy", *self.loaded):
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if "allowed_token_ids" in body:
            return {"choices": [{"logprobs": {"token_logprobs": [-3.0 if self.raw else 0.0]}}]}
        return self.probe(body) if "prompt_logprobs" in body else self.complete(body)

    def probe(self, body: dict[str, Any]) -> Any:
        probe = WeightCheck(self.policy)
        assert tuple(body["prompt"]) == probe.tokens
        probe.take()
        given = [{str(t): {"logprob": x}} for t, x in zip(probe.tokens[1:], probe.now or (), strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *given]}]}

    def complete(self, body: dict[str, Any]) -> Any:
        self.asked += 1
        seeds = tuple(derive_seed(body["seed"], member) for member in range(body["n"]))
        sampling = Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"])
        (answers,) = self.engine.generate([Request(prompt=tuple(body["prompt"]), seeds=seeds)], sampling)
        return {
            "choices": [
                {
                    "index": index,
                    "token_ids": list(answer.tokens),
                    "logprobs": {"token_logprobs": list(answer.logprobs)},
                    "finish_reason": "length" if answer.finish == "length" else "stop",
                }
                for index, answer in enumerate(answers)
            ]
        }


def refusal(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


class Handler(BaseHTTPRequestHandler):
    fake: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(lambda: self.fake.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def work() -> Any:
            self.fake.under_way += 1
            try:
                with self.fake.lock:
                    torch.set_num_threads(1)
                    return self.fake.post(self.path, body)
            finally:
                self.fake.under_way -= 1

        self.answer(work)

    def answer(self, work: Any) -> None:
        mood = self.fake.mood
        if mood == "dead":
            self.close_connection = True
            self.connection.close()
            return
        if mood == "hanging":
            time.sleep(3)
        found = refusal(500, "broken") if mood == "broken" else work()
        code = found["error"]["code"] if "error" in found else 200
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    print(StandIn(rank=given.rank, port=given.port).address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
