"""MaxText's trainer with a tiny Qwen3-Next on a CPU, with its own gated delta rule or with chunkwise's.

`python -m tests_e2e.hosts.maxtext_trainer OPTIONS RESULT` writes the loss of every step to RESULT; OPTIONS is JSON, as
`Options` has it.
"""

import collections
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from chunkwise.integrations import maxtext
from tests_e2e.hosts.host import count_calls


class Options(NamedTuple):
    """What a run is.

    Attributes:
      ours: "functions" or "layer", as `maxtext.install` has them; None for MaxText's own.
      documents: whether a row has several documents; with "alone" each of them has a row of its own, and padding.
      dtype: of hidden states.
      devices: over which rows and parameters are divided.
      steps: of training.
    """

    ours: str | None = None
    documents: str | None = None
    dtype: str = "float32"
    devices: int = 1
    steps: int = 20


ROWS, LENGTH, VOCABULARY = 4, 256, 512
# The tokens of the documents of each row.
DOCUMENTS = ((100, 156), (17, 239), (128, 64, 64), (200, 50))
SIZES = dict(
    base_emb_dim=128, base_num_decoder_layers=4, base_num_query_heads=4, base_num_kv_heads=2, head_dim=32,
    vocab_size=VOCABULARY, base_mlp_dim=64, base_moe_mlp_dim=64, num_experts=4, num_experts_per_tok=2, shared_experts=1,
    gdn_key_head_dim=32, gdn_value_head_dim=32, gdn_num_key_heads=2, gdn_num_value_heads=4,
)  # fmt: skip
AROUND = dict(
    run_name="tiny", base_output_directory="maxtext_output", hardware="cpu", enable_checkpointing=False,
    model_name="qwen3-next-80b-a3b", override_model_config=True, dataset_type="synthetic", attention="dot_product",
    sparse_matmul=False, megablox=False, skip_jax_distributed_system=True, enable_goodput_recording=False,
    monitor_goodput=False, log_config=False, enable_tensorboard=False, max_target_length=LENGTH,
)  # fmt: skip


def batch_of(documents: str) -> dict[str, np.ndarray]:
    """Return a batch of MaxText's, of random documents whose inputs end before their last token."""
    tokens, rows = np.random.default_rng(0).integers(VOCABULARY, size=(ROWS, LENGTH + 1)), []
    for line, lengths in zip(tokens, DOCUMENTS, strict=True):
        parts = [line[end - size : end + 1] for size, end in zip(lengths, np.cumsum(lengths), strict=True)]
        rows += [[part] for part in parts] if documents == "alone" else [parts]
    names = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation")
    batch = {name: np.zeros((len(rows), LENGTH), np.int32) for name in names}
    for row, parts in enumerate(rows):
        begin = 0
        for n, part in enumerate(parts, 1):
            at, begin = np.s_[row, begin : begin + len(part) - 1], begin + len(part) - 1
            batch["inputs"][at], batch["targets"][at] = part[:-1], part[1:]
            for side in ("inputs", "targets"):
                batch[f"{side}_position"][at], batch[f"{side}_segmentation"][at] = np.arange(len(part) - 1), n
    return batch


def main(o: Options, result: Path) -> None:
    """Train, and write down the losses."""
    from maxtext.common import metric_logger
    from maxtext.input_pipeline import synthetic_data_processing as data
    from maxtext.models import qwen3
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding

    calls = collections.Counter()
    count_calls(maxtext, "chunk_gated_delta_rule", calls)
    if o.ours == "layer":
        from chunkwise.integrations.maxtext import layer

        count_calls(layer, "gated_delta_net", calls)
    if o.ours:
        maxtext.install(documents=o.ours == "layer")

    steps, log, times = [], metric_logger.MetricLogger.log_metrics, [time.process_time()]

    def note(self, metrics, step, *more, **options):
        loss = float(metrics["scalar"]["learning/loss"])
        times.append(time.process_time())
        steps.append(dict(loss=loss, seconds=times[-1] - times[-2]))
        return log(self, metrics, step, *more, **options)

    def batch(self):
        return jax.device_put(batch_of(o.documents), sharding.get_input_data_sharding(self.config, self.mesh))

    metric_logger.MetricLogger.log_metrics = note
    if o.documents:
        data.SyntheticDataIterator.__next__ = batch
    rows = sum(map(len, DOCUMENTS)) if o.documents == "alone" else ROWS
    options = SIZES | AROUND | dict(steps=o.steps, dtype=o.dtype, per_device_batch_size=rows // o.devices)
    config = Path(qwen3.__file__).parents[1] / "configs/base.yml"
    train.main([sys.argv[0], str(config), *(f"{name}={value}" for name, value in options.items())])
    result.write_text(json.dumps(dict(steps=steps, calls=calls)))


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])), Path(sys.argv[2]))
