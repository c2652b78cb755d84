"""What an adapter's own words about its base mean for the one it is served on."""

import pytest

from multilora_cli.adapters.base_match import match_base


@pytest.mark.parametrize(
    ("named", "revision", "served", "served_revision", "kind"),
    [
        (None, None, "org/model-8b", None, "unnamed"),
        ("", "main", "org/model-8b", "main", "unnamed"),
        ("org/model-8b", None, "org/model-8b", "abc", "same"),
        ("/data/models/Model-8B/", None, "./model-8b", None, "same"),
        ("C:\\models\\model-8b", None, "org/model-8b", None, "same"),
        ("org/model-8b", "abc", "org/model-8b", "abc", "same"),
        ("org/model-8b", "abc", "org/model-8b", "def", "revision"),
        ("org/model-8b", None, "other/Model-8B-AWQ", None, "stored_otherwise"),
        ("org/model-8b", None, "other/model-8b-FP8-dynamic", None, "stored_otherwise"),
        ("org/model-8b-bnb-4bit", None, "org/model-8b", None, "stored_otherwise"),
        ("org/model-8b", None, "org/model-8b-instruct", None, "other"),
        ("org/model-7b", None, "org/model-8b", None, "other"),
    ],
)
def test_match(
    named: str | None, revision: str | None, served: str, served_revision: str | None, kind: str
) -> None:
    match = match_base(named, revision, served, served_revision)
    assert match.kind == kind
    assert match.is_warning == (kind in ("revision", "other"))
    assert match.text.isprintable()
    if named and kind not in ("same", "unnamed"):
        assert repr(served) in match.text or repr(served_revision) in match.text
