"""The published contract: an OpenAPI document, and a page that shows it without any network."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from multilora_cli import __version__
from multilora_cli.server.auth import Policy
from multilora_cli.server.routing import RouteSpec

_REFERENCE = "#/components/schemas/"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222}h2{margin-top:2.5rem;border-top:1px solid #ddd;padding-top:1rem}"
    "code,pre{font:13px ui-monospace,monospace}pre{background:#f5f5f5;padding:.8rem;"
    "overflow:auto}table{border-collapse:collapse;width:100%}td,th{text-align:left;"
    "vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #eee}"
    "td{overflow-wrap:anywhere}td:first-child{min-width:min(15rem,40vw)}"
    "h2 code{font-size:17px;font-weight:600}.policy{color:#666;font-size:13px}"
)


def openapi_document(title: str, routes: Sequence[RouteSpec]) -> dict[str, Any]:
    """OpenAPI 3.1 of some routes, with a schema for every body."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REFERENCE + "{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    components = {**components, "Error": _ERROR_SCHEMA}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, by_body)
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: RouteSpec, by_body: Mapping[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE + "Error"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "Success", "content": {route.media: {}}},
            "default": {"description": "Failure", "content": error},
        },
        "x-policy": str(route.policy),
    }
    if route.policy is not Policy.PUBLIC:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        content = {"application/json": {"schema": by_body[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{" in route.path:
        name = route.path.split("{")[1].split(":")[0].rstrip("}")
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    return operation


def docs_page(document: Mapping[str, Any]) -> str:
    """One HTML page without scripts, fonts or addresses of other machines."""
    title = html.escape(document["info"]["title"])
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width'><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        "<p>OpenAI-compatible. Failures are <code>{&quot;error&quot;: {message, type, param,"
        " code}}</code>; every reply has an <code>x-request-id</code>. Machine-readable:"
        " <a href=/openapi.json>/openapi.json</a>.</p>",
        "<p>Where keys are set, <i>tenant</i> needs any of them and <i>admin</i> the admin key, as"
        " <code>Authorization: Bearer KEY</code>; <i>public</i> needs none.</p>",
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_section(path, method, operation))
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(schemas.items()):
        parts += [f"<h3 id={html.escape(name)}>{html.escape(name)}</h3>", _table(schema)]
    return "".join(parts) + "</html>"


def _section(path: str, method: str, operation: Mapping[str, Any]) -> str:
    text = (
        f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
        f"<p>{html.escape(operation['summary'])}"
        f" <span class=policy>({html.escape(operation['x-policy'])})</span></p>"
    )
    body = operation.get("requestBody")
    if body is not None:
        text += f"<p>Body: {_type(body['content']['application/json']['schema'])}</p>"
    return text


def _table(schema: Mapping[str, Any]) -> str:
    rows = [f"<p>{html.escape(schema.get('description', ''))}</p><table>"]
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else ""
        if field.get("default") is not None:
            note = f"default {json.dumps(field['default'])}"
        rows.append(
            f"<tr><td><code>{html.escape(name)}</code><td>{_type(field)}"
            f"<td>{html.escape(' '.join(filter(None, [note, *_descriptions(field)])))}</tr>"
        )
    return "".join(rows) + "</table>"


def _descriptions(field: Mapping[str, Any]) -> Iterable[str]:
    for part in (field, *field.get("anyOf", ())):
        if "description" in part:
            yield str(part["description"])


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        name = html.escape(field["$ref"].removeprefix(_REFERENCE))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"<code>{html.escape(json.dumps(v))}</code>" for v in field["enum"])
    kind = html.escape(str(field.get("type", "any")))
    if kind == "array" and isinstance(field.get("items"), Mapping):
        kind = f"array of {_type(field['items'])}"
    if kind == "object" and isinstance(field.get("additionalProperties"), Mapping):
        kind = f"map to {_type(field['additionalProperties'])}"
    return kind + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    words = {
        "minimum": "from", "exclusiveMinimum": "above", "maximum": "to",
        "exclusiveMaximum": "below", "minLength": "at least", "maxLength": "at most",
        "minItems": "at least", "maxItems": "at most", "maxProperties": "at most",
    }  # fmt: skip
    found = [f"{word} {field[key]}" for key, word in words.items() if key in field]
    return f" ({', '.join(found)})" if found else ""
