"""`groupwise doctor`: trouble that is better found before a run than in it."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    template: Annotated[
        str, typer.Option(metavar="MODEL", help="Prove that this model's chat template is append-only.")
    ],
) -> int:
    """Look for trouble before it costs a run. Exit code 1: there is some."""
    from groupwise.model.source import model_folder
    from groupwise.model.template import template_verdict

    fine, sentence = template_verdict(model_folder(template))
    print(f"{template}: {sentence}")
    return 0 if fine else 1
