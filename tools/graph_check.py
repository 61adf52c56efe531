"""Checks the dump of a captured graph, without a GPU: each two uses of the same bytes have a path between them.

python3 tools/graph_check.py graph.json.gz                the faults, as JSON; status 1 if there are any
python3 tools/graph_check.py graph.json.gz --take-out     also what is noticed when an edge of a copy is taken out

The part `dump` of tools/graph_probe.py writes such a file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from graph_probe.order import Edge, Node, check, take_out


def read(path: Path) -> tuple[list[Node], list[Edge]]:
    """Return nodes and edges of a dump."""
    with gzip.open(path, "rt") as file:
        dump = json.load(file)
    return dump["nodes"], [(source, target) for source, target in dump["edges"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the check has found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dump", type=Path)
    parser.add_argument("--take-out", action="store_true", help="each edge of a copy, one at a time")
    options = parser.parse_args(arguments)
    nodes, edges = read(options.dump)
    found = check(nodes, edges)
    print(json.dumps(found.summary()))
    if options.take_out:
        print(json.dumps({name: len(taken) for name, taken in vars(take_out(nodes, edges)).items()}))
    return 0 if found.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
