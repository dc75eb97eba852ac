"""The OpenAPI document says what is really read: no route, option or value more or less."""

import json
from typing import Any

import pytest

from dspark.serving import protocol
from dspark.serving.options import CALLER_LABELS, NEUTRAL_VALUES
from dspark.serving.protocol import parse
from dspark.testing import tiny_target
from tests.unit.served import client_of, tokenizer_of


@pytest.fixture(scope="module")
def made() -> Any:
    with client_of(tiny_target(), None, tokenizer_of()) as http:
        response = http.get("/openapi.json")
        assert response.status_code == 200
        assert http.get("/docs").status_code == 404
    return response.json()


def test_every_route_is_told_and_every_body_has_its_model(made: Any) -> None:
    bodies = {
        path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path, operation in made["paths"].items()
        if "post" in operation and path != "/flush_cache"
    }
    assert {path: ref.rpartition("/")[2] for path, ref in bodies.items()} == {
        "/v1/chat/completions": "ChatRequest",
        "/v1/completions": "CompletionRequest",
        "/generate": "GenerateRequest",
        "/abort_request": "AbortRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    for path in ("/", "/live", "/v1/models", "/health", "/ping", "/health_generate", "/version",
                 "/metrics"):  # fmt: skip
        assert "get" in made["paths"][path]
    assert set(made["paths"]["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}
    for path in made["paths"].values():
        for operation in path.values():
            assert "default" in operation["responses"]


def test_every_reference_leads_somewhere(made: Any) -> None:
    text = json.dumps(made)
    names = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(made["components"]["schemas"])


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_options_are_those_that_are_known(made: Any, name: str) -> None:
    schema = made["components"]["schemas"][name]
    model = getattr(protocol, name)
    assert set(schema["properties"]) == {
        *model.model_fields,
        *NEUTRAL_VALUES[name],
        *CALLER_LABELS,
    }
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    "name", ["ChatRequest", "CompletionRequest", "GenerateRequest", "TokenizeRequest"]
)
def test_null_and_neutral_values_are_accepted_as_told(made: Any, name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
        "CompletionRequest": {"prompt": "a"},
    }
    body = needed.get(name, {})
    for option, schema in made["components"]["schemas"][name]["properties"].items():
        values = schema.get("enum", [] if option in body else [None])
        for value in values:
            parse(getattr(protocol, name), json.dumps({**body, option: value}).encode())


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_what_may_be_left_out_may_be_null(made: Any, name: str) -> None:
    schema = made["components"]["schemas"][name]
    for option, value in schema["properties"].items():
        if option not in schema.get("required", ()) and set(value) != {"description"}:
            assert None in value.get("enum", ()) or {"type": "null"} in value["anyOf"], option
