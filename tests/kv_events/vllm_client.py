"""A program for an environment with vLLM. It reads a replay with vLLM's types, and publishes it
with vLLM's
publisher. Arguments: the endpoint of the replay, and endpoints to publish and replay."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import msgspec
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

source, endpoint, replay_endpoint = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(source)
socket.send_multipart([b"", bytes(8)])
decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
publisher = ZmqEventPublisher(0, endpoint, replay_endpoint)
batches = []
while True:
    _, topic, seq, payload = socket.recv_multipart()
    if seq == ZmqEventPublisher.END_SEQ:
        break
    batches.append(decoder.decode(payload))
    publisher.publish(batches[-1])
output = {"config": asdict(KVEventsConfig()), "batches": msgspec.to_builtins(batches)}
print(json.dumps(output), flush=True)
sys.stdin.read()
publisher.shutdown()
