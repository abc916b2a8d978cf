"""`gyre verify`: audit a run's ledger."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def verify(
    run: Annotated[str | None, typer.Argument(help="Name or path; default: the newest run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Audit a run's ledger: journals, shards, micro-steps, merges, checkpoints. Exit code 1 when a rule is broken."""
    from gyre.views.audit import audit
    from gyre.views.runs import open_run

    rules = audit(open_run(run))
    if as_json:
        import msgspec

        print(msgspec.json.encode(rules).decode())
    else:
        for rule in rules:
            print(f"{'ok  ' if not rule.breaches else 'BAD '} {rule.rule} ({rule.cases} looked at)")
            for breach in rule.breaches[:10]:
                print(f"       {breach}")
    if any(rule.breaches for rule in rules):
        raise typer.Exit(1)
