"""Records what every layout of files draws, what `info` says of it and how broken ones are refused; compares it later.

    python tools/write_golden.py                      # writes tests/golden/ again
    python tools/write_golden.py sana                 # of one family
    python tools/write_golden.py --compare            # prints every difference, and exits with 1 if there is one
    python tools/write_golden.py --compare z-image    # of one family

Hashes of latents are equal only on the machine and with the packages that recorded them, which
tests/golden/machines.json has for each family.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
from support import frameworks  # noqa: F401
from support.golden import DATA, FAMILIES, MACHINES, differences, load, machine, record


def main(args: list[str]) -> int:
    compare, failed = "--compare" in args, 0
    families = [name for name in args if name != "--compare"] or list(FAMILIES)
    for family in families:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            found = record(family, Path(place).resolve())
        counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in found.items())
        print(f"{family}: {counts}, {time.process_time() - start:.0f} s of CPU", flush=True)
        if compare:
            lines = differences(load(family), found)
            failed += len(lines)
            print("".join(f"{family}: {line}\n" for line in lines), end="")
        else:
            DATA.mkdir(exist_ok=True)
            text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
            (DATA / f"{family}.json").write_text(text + "\n", encoding="utf-8")
    machines = json.loads(MACHINES.read_text(encoding="utf-8"))
    if compare:
        others = [family for family in families if machines[family] != machine()]
        print(f"{failed} differences" + (f"; recorded on another machine: {', '.join(others)}" if others else ""))
    else:
        machines |= dict.fromkeys(families, machine())
        MACHINES.write_text(json.dumps(machines, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
