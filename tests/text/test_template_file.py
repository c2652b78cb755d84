"""`chat_template: FILE`: what is read, what is refused, and where a fleet file says it."""

import time
from pathlib import Path

import pytest

from multilora_cli.adapters.entry import AdapterRequest
from multilora_cli.errors import AdapterError, FleetError, RequestError
from multilora_cli.fleet.expand import expand_adapters
from multilora_cli.fleet.load import load_fleet
from multilora_cli.text.adapter_text import OwnFiles, TextChecker
from multilora_cli.text.chat_template import ChatTemplate
from tests.fakes import VOCAB, own_tokenizer


def asked(file: Path, **fields: str) -> AdapterRequest:
    return AdapterRequest("a", "x", chat_template=str(file), **fields)  # type: ignore[arg-type]


def test_the_file_goes_with_either_tokenizer_and_before_what_the_folder_has(tmp_path: Path) -> None:
    folder, file = own_tokenizer(tmp_path / "own"), tmp_path / "chat.jinja"
    (folder / "chat_template.jinja").write_text("of the folder")
    file.write_text("{{ messages[0].content }}!")
    with_base = OwnFiles(folder, asked(file)).load(VOCAB)
    assert with_base.tokenizer is None and with_base.template == "{{ messages[0].content }}!"
    both = OwnFiles(folder, asked(file, tokenizer="adapter")).load(VOCAB)
    assert both.tokenizer is not None and both.template == with_base.template
    # Mounted settings are links to links.
    link = tmp_path / "link.jinja"
    link.symlink_to(file)
    assert OwnFiles(folder, asked(link)).load(VOCAB).template == with_base.template
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    assert OwnFiles(nothing, asked(file)).load(VOCAB).template == with_base.template


def test_its_content_is_what_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jinja", tmp_path / "second.j2"
    for file in (first, second):
        file.write_text("same")
    check = TextChecker(VOCAB)
    before = check(tmp_path, asked(first))
    assert before == check(tmp_path, asked(second))
    second.write_text("other")
    assert before != check(tmp_path, asked(second))
    requests = [asked(first), asked(second), AdapterRequest("a", "x")]
    assert len({request.fingerprint() for request in requests}) == 3
    assert all(request.has_own_text and not request.text_files for request in requests[:2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not there, or not a file"),
        ("folder", "not there, or not a file"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (256 * 1024 + 1), "262,145 bytes, expected at most 262,144"),
        (b"{% for m in messages %}", "chat template: TemplateSyntaxError"),
        (b"{{ x | nosuchfilter }}", "chat template: TemplateAssertionError"),
        (b"{% include 'other' %}", None),
    ],
)
def test_a_bad_file_is_refused_with_adapter_and_path(
    tmp_path: Path, content: bytes | str | None, message: str | None
) -> None:
    file = tmp_path / "bad.jinja"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.mkdir()
    if message is None:  # no loader: it cannot be rendered, and nothing is read
        source = OwnFiles(tmp_path, asked(file)).load(VOCAB).template
        assert source is not None
        with pytest.raises(RequestError, match="cannot render"):
            ChatTemplate(source, {}, ()).render([{"role": "user", "content": "x"}])
        return
    with pytest.raises(AdapterError) as caught:
        TextChecker(VOCAB)(tmp_path, asked(file))
    assert caught.value.message.startswith(f"adapter a: chat_template: {file}: ")
    assert message in caught.value.message and "\n" not in caught.value.message
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_hostile_file_is_bounded_as_every_template_is(tmp_path: Path, hostile: str) -> None:
    file = tmp_path / "hostile.jinja"
    file.write_text(hostile)
    source = OwnFiles(tmp_path, asked(file)).load(VOCAB).template
    assert source is not None
    began = time.monotonic()
    with pytest.raises(RequestError):
        ChatTemplate(source, {}, ()).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - began < 20 and not Path("marker").exists()


def test_in_a_fleet_file_it_is_relative_to_that(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    text = "base: {model: demo:base}\nadapters: [{name: a, source: demo:roman, chat_template: %s}]"
    fleet.write_text(text % "prompts/../chat.jinja")
    (adapter,) = expand_adapters(load_fleet(fleet))
    assert adapter.chat_template == str(tmp_path / "chat.jinja")
    assert adapter.has_text_files and not adapter.uses_own_text
    fleet.write_text(text % "adaptor")
    with pytest.raises(FleetError) as caught:
        load_fleet(fleet)
    expected = 'found "adaptor", expected base, adapter, or a file that ends in .jinja or .j2'
    assert "adapters.0.chat_template" in str(caught.value) and expected in str(caught.value)
