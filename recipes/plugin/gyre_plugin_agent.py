"""Runs in the sandbox: one chat completion, without tools."""

import json
import os
import sys
import urllib.request
from pathlib import Path


def main() -> None:
    url, model = sys.argv[1:]
    question = Path("/run/gyre/question.txt").read_text()
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32}
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    Path("answer.txt").write_text(message["content"] or "")


if __name__ == "__main__":
    main()
