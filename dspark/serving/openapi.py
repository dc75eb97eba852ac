"""The OpenAPI document, from the request models that `protocol.parse` reads bodies with.

FastAPI writes the paths. It cannot see the bodies, so each route names its model (`body_of`), and
what `parse` accepts beyond a model's own fields is added here: null for what may be left out, and
options that are not implemented, with the values that ask for nothing.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dspark.serving import protocol
from dspark.serving.options import CALLER_LABELS, NEUTRAL_VALUES

__all__ = ["body_of", "document"]

_SCHEMAS = "#/components/schemas/"
_ERROR = {
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
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: it reads this model."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if "stream" in model.model_fields:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = {**_model_schemas(), "Error": _ERROR}
    made.setdefault("components", {})["schemas"] = schemas
    made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}
    for path in made["paths"].values():
        for operation in path.values():
            operation["security"] = [{}, {"key": []}]
            # of FastAPI's own for a path with a name in it, which any text fits
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error", "content": content}
    return made


def _model_schemas() -> dict[str, Any]:
    models = [getattr(protocol, name) for name in NEUTRAL_VALUES]
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = made["$defs"]
    for name, schema in schemas.items():
        required = schema.get("required", ())
        fields = schema["properties"]
        schema["properties"] = {
            **{key: fields[key] if key in required else _or_null(fields[key]) for key in fields},
            **{key: _neutral(values) for key, values in NEUTRAL_VALUES[name].items()},
            **{
                key: {"description": "For the caller's own records."}
                for key in sorted(CALLER_LABELS)
            },
        }
    return schemas


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    options = field.get("anyOf", ())
    if {"type": "null"} in options or field.get("default", 0) is None:
        return field
    title: dict[str, Any] = {
        key: field[key] for key in ("title", "description", "default") if key in field
    }
    bare = {key: value for key, value in field.items() if key not in title}
    return {**title, "anyOf": [bare, {"type": "null"}]}


def _neutral(values: tuple[Any, ...]) -> dict[str, Any]:
    return {
        "enum": [*values, None],
        "description": "Not implemented; these values ask for nothing.",
    }
