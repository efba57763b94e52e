"""A program that alternates passes that keep states and passes that do not, with more threads than
processors."""

import torch

from cbatch.runtime.drafting.heads.trial import fresh_kv, whole_text
from tests.runtime.engines import tiny_model

if __name__ == "__main__":
    torch.set_num_threads(8)
    model, ids = tiny_model(), torch.arange(40)
    batch, kv = whole_text(ids), fresh_kv(model, len(ids))
    with torch.inference_mode():
        for _ in range(3000):
            for layers in ((2,), ()):
                model.keep_hidden(layers)
                model.forward(batch, kv, model.allocate_hidden(len(ids)))
