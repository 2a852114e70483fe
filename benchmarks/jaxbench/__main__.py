"""`python -m benchmarks.jaxbench CHECKOUT` checks our programs for JAXBench, and compiles them for TPUs.

CHECKOUT is a folder of AI-Hypercomputer/accelerator-agents, whose inputs, reference and check are used.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from benchmarks import jaxbench


def main() -> None:
    """Check, compile, print, and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jaxbench", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a folder of AI-Hypercomputer/accelerator-agents")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each compilation")
    options = parser.parse_args()
    rows = []
    for row in jaxbench.measure(options.checkout, options.timeout):
        print(row, flush=True)
        rows.append(row)
    if options.json:
        about = dict(command="python -m benchmarks.jaxbench CHECKOUT", measured=date.today().isoformat())
        options.json.write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")
    sys.exit(any("failed" in row and row["program"] == "ours" for row in rows))


if __name__ == "__main__":
    main()
