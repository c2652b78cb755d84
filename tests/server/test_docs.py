"""The published contract: complete, valid, and readable without any network."""

import asyncio
import re

from tests.server.conftest import InProcess
from tests.server.test_auth import GOLDEN


async def _docs(folder) -> None:
    async with InProcess(folder) as app:
        document = (await app.http.get("/openapi.json")).json()
        lines = {
            f"{method.upper()} {path}": operation
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }
        policies = {line.replace(":path}", "}"): policy for line, policy in GOLDEN.items()}
        assert set(lines) == set(policies)
        schemas = document["components"]["schemas"]
        for line, operation in lines.items():
            assert operation["x-policy"] == policies[line]
            assert operation["summary"]
            if line.startswith("POST"):
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                name = schema["$ref"].rsplit("/", 1)[1]
                assert schemas[name]["properties"]
        references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
        assert references <= set(schemas)
        page = await app.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "script-src" not in page.headers["content-security-policy"]
        assert not re.search(r"https?://|<script|<link|<img|@import|url\(", page.text)
        for name, schema in schemas.items():
            assert f"id={name}>" in page.text
            for field in schema.get("properties", {}):
                assert f"<code>{field}</code>" in page.text
        for line in lines:
            assert line.replace("{", "{") in page.text
        temperature = schemas["ChatBody"]["properties"]["temperature"]
        assert {"minimum", "maximum"} <= set(temperature["anyOf"][0])
        assert "0 is greedy" in page.text


def test_contract_and_page(tmp_path):
    asyncio.run(_docs(tmp_path))
