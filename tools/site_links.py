# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links from the documents to files outside of docs/ lead to the repository."""

from __future__ import annotations

import os
import re
from typing import Any

_OUTSIDE = re.compile(r"\]\((?:\.\./)+(?!docs/)([^)]*)\)")
_RESULT = re.compile(r"\]\(((?:\.\./)*(?:results/)?[\w-]+\.jsonl?|results)\)")
REPOSITORY = os.environ.get("REPOSITORY_URL", "https://example.invalid/offload-engine") + "/blob/main/"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Replace the links of one page."""
    folder = os.path.dirname(page.file.src_uri)

    def replace(found: re.Match[str]) -> str:
        target = found[0][2:-1]
        path = os.path.normpath(os.path.join("docs", folder, target))
        is_inside = path.startswith("docs/") and not path.endswith((".json", ".jsonl")) and path != "docs/results"
        return found[0] if is_inside else f"]({REPOSITORY}{path})"

    return _RESULT.sub(replace, _OUTSIDE.sub(replace, markdown))
