"""The batches that stages are tested on."""

from chunkwise.shared.testing.cases import Case

# Few cases, because interpreted kernels are slow. Together they have every chunk size, gate and type, every kind of
# last chunk, head dimensions from 1 to 256, grouped heads, and empty sequences everywhere in a packed batch.
CASES = (
    Case(T=1, K=64, V=128, repeats=True),
    Case(B=2, T=37, HV=2, K=60, V=100, gate="spikes"),
    Case(T=70, H=2, HV=2, K=1, V=60, chunk_size=32, gate="strong", repeats=True),
    Case(T=64, HV=3, K=128, V=256, chunk_size=32, dtype="bfloat16", gate="logsigmoid*10", repeats=True),
    Case(T=130, K=100, V=1, chunk_size=128, gate="logsigmoid/10", repeats=True),
    Case(B=2, T=35, H=2, HV=4, K=256, V=64, chunk_size=16, dtype="bfloat16", gate="zero"),
    Case(T=100, HV=2, K=60, V=64, chunk_size=16, lengths=(1, 0, 17, 32, 0, 33, 3)),
    Case(T=140, K=64, V=100, dtype="bfloat16", gate="logsigmoid*100", lengths=(0, 64, 65, 1, 0), repeats=True),
    Case(T=20, HV=2, K=128, V=60, chunk_size=128, gate="spikes", lengths=(0, 0, 3, 12, 0)),
)

# Two rows of a batch, and a pack with an empty sequence and padding: for tests of isolation.
ISOLATION_CASES = (
    Case(B=2, T=19, HV=2, K=4, V=3, chunk_size=16, repeats=True),
    Case(T=30, HV=2, K=4, V=3, chunk_size=16, lengths=(5, 0, 18)),
)
