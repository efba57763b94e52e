"""The operations of the OpenAPI document, and a check of every answer to one."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from cbatch.server.protocol.openapi import document

CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = [
    operation.ok() for operation in schemathesis.openapi.from_dict(document()).get_all_operations()
]
