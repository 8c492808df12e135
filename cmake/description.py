# SPDX-License-Identifier: MIT
"""The description that a package index shows: README.md with its links to files made absolute, by the repository's address
in pyproject.toml. A provider of metadata for scikit-build-core."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


def repository():
    """The address of [project.urls], which holds it for all."""
    return re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def absolute(text, address):
    """Links of Markdown to files, and images, of the branch main. Comments are for this repository's tools."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)([^)\s]+)", rf"\g<1>{address}/raw/main/\g<2>", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)", rf"\g<1>{address}/blob/main/\g<2>", text)


def dynamic_metadata(field, settings):
    if field != "readme":
        raise ValueError(f"description.py gives the readme, not {field}")
    return {"content-type": "text/markdown", "text": absolute((ROOT / "README.md").read_text(), repository())}
