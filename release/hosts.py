"""What the sessions of hosts install."""

from release.packages import FOLDERS

# The hosts of packages/integrations: what a session installs, in a host's own pins, and what it installs alone because
# a host brings far more than is called here, such as torch for another accelerator. A host with an extra of
# packages/integrations comes by it, as users get it.
EXTRA = f"{FOLDERS['integrations']}[{{}}]"
HOSTS = {
    "sglang-jax": ((EXTRA.format("sglang-jax"), "sglang-jax==0.1.0rc0"), ()),
    "maxtext": ((EXTRA.format("maxtext"), "maxtext==0.2.5"), ()),
    "levanter": ((EXTRA.format("levanter"), "jax[tpu]==0.11.2"), ()),
    "tpu-inference": (("jax[tpu]==0.11.2", "absl-py", "safetensors", "rich"), ("tpu-inference==0.32.0",)),
    "keras-hub": ((EXTRA.format("keras-hub"), "keras-hub==0.32.0"), ()),
    "lm-eval": (("lm-eval==0.4.13", "tokenizers", "jax", "safetensors", "rich"), ()),
    "qwix": ((EXTRA.format("nnx"), "qwix==0.1.8"), ()),
    # No hosts, but their tests run with our operators in the place of theirs; two archives build with these.
    "tokamax": (("tokamax==0.0.17", "jax[tpu]", "absl-py", "chex"), ()),
    "flash-linear-attention": (
        ("torch==2.13.0", "jax", "einops", "safetensors"),
        ("fla-core==0.6.0", "flash-linear-attention==0.6.0"),
    ),
    "mamba": (("torch==2.13.0", "jax", "einops"), ()),
    "deltanet-tpu": (("deltanet-tpu==0.3.0", "pip"), ()),
    "jax-linear-attention": (
        ("jax-linear-attention==0.1.0", "pip", "setuptools", "wheel"),
        # They would bring CUDA's libraries; a compilation for an H100 needs the assembler alone.
        ("jax-cuda13-plugin==0.11.2", "jax-cuda13-pjrt==0.11.2", "nvidia-cuda-nvcc"),
    ),
}
