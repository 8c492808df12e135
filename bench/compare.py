# SPDX-License-Identifier: MIT
"""compare.py BASE.jsonl NEW.jsonl - what changed between two runs of `normfuse bench --json`, row by row.

A row is faster or slower when the two ratios to the copy floor differ by more than the noise of both, else inside
noise; noise is the distance from the median to the 10th and the 90th percentile, at least 3 %. Where a file holds a
problem several times, the middle ratio counts. Exit code 1: something is slower."""
import argparse
import collections
import json
import statistics
import sys

SMALLEST_NOISE = 0.03  # floors of one machine differ that much from run to run


def read(path):
    rows = collections.defaultdict(list)
    with open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if "ratio" in row:
                    rows[row.get("impl", "normfuse"), row["problem"], row["threads"], row["cache"]].append(row)
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"compare.py: {path}:{number}: not a row of normfuse bench --json ({error})")
    return rows


def summary(rows):
    """(ratio, noise as a share of it)"""
    ratio = statistics.median(row["ratio"] for row in rows)
    noise = max(max(row["p90_us"] - row["median_us"], row["median_us"] - row["p10_us"]) / row["median_us"]
                for row in rows)
    return ratio, max(noise, SMALLEST_NOISE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("new")
    args = parser.parse_args()
    base, new = read(args.base), read(args.new)
    verdicts = collections.Counter()
    for key in list(base) + [key for key in new if key not in base]:
        implementation, problem, threads, cache = key
        name = f"{implementation:14} {problem}  threads={threads} {cache}"
        if key not in base or key not in new:
            verdict, figures = f"only in {'base' if key in base else 'new'}", ""
        else:
            (before, base_noise), (after, new_noise) = summary(base[key]), summary(new[key])
            noise = (base_noise ** 2 + new_noise ** 2) ** 0.5
            change = after / before - 1
            verdict = "inside noise" if abs(change) <= noise else "slower" if change > 0 else "faster"
            figures = f"{before:.3f} -> {after:.3f}, noise {100 * noise:.0f} %"
        verdicts[verdict] += 1
        print(f"{verdict:12}  {name}  {figures}")
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items())) or "no rows")
    return 1 if verdicts["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
