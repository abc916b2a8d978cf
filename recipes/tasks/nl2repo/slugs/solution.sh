#!/bin/bash
mkdir slugs
cat > slugs/__init__.py <<'PYTHON'
import itertools
import re


def slugify(text, separator="-"):
    return separator.join(re.findall(r"[a-z0-9]+", text.lower()))


def unique(text, taken):
    slug = slugify(text)
    candidates = itertools.chain([slug], (f"{slug}-{n}" for n in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)
PYTHON
