"""The routes of OpenAI's Responses API and of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import MediaType, delete, get, post
from litestar import Response as HttpResponse
from litestar.handlers import HTTPRouteHandler

from cbatch.core.request.errors import FieldError
from cbatch.server.http.handler import AnyRequest, AnyResponse, CompletionHandler, Parse
from cbatch.server.http.middleware import record_of
from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.response_store import KeyResponses, ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from cbatch.server.protocol.translation import renamed
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.agent_encoders import MessagesEncoder, ResponsesEncoder
from cbatch.server.serving.open_request import Deadline, ending_at
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.replies import Encoder


def agent_routes(
    completions: CompletionHandler, limits: Limits, prompts: PromptReader
) -> list[HTTPRouteHandler]:
    store = ResponseStore(limits.response_store_bytes, limits.response_store_age_s)

    def responses_of(request: AnyRequest) -> KeyResponses:
        return store.of(record_of(request).key)

    def parse_of(request: AnyRequest) -> Parse:
        hold = record_of(request).memory.hold
        return partial(parse_responses, responses=responses_of(request), hold=hold)

    async def count(request: AnyRequest, parse: Parse, kind: type[Encoder]) -> int:
        api_request, record = await completions.read(request, parse), record_of(request)
        (prompt,) = api_request.prompts
        deadline = Deadline.of(record.began_s, api_request.timeout_s, limits.timeout_s)
        try:
            async with ending_at(deadline):
                return len(await prompts.ids(prompt, record.memory.owner))
        except FieldError as error:
            raise renamed(error, kind.field_names) from error

    @post("/v1/responses", status_code=200)
    async def responses(request: AnyRequest) -> AnyResponse:
        return await completions.respond(request, parse_of(request), ResponsesEncoder)

    @post("/v1/responses/input_tokens", status_code=200)
    async def input_tokens(request: AnyRequest) -> dict[str, Any]:
        num_tokens = await count(request, parse_of(request), ResponsesEncoder)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @get("/v1/responses/{response_id:str}")
    async def stored(request: AnyRequest) -> HttpResponse[bytes]:
        body = responses_of(request).body(request.path_params["response_id"])
        record_of(request).memory.hold(len(body))
        return HttpResponse(body, media_type=MediaType.JSON)

    @delete("/v1/responses/{response_id:str}", status_code=200)
    async def dropped(request: AnyRequest) -> dict[str, Any]:
        response_id = request.path_params["response_id"]
        responses_of(request).delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @post("/v1/messages", status_code=200)
    async def messages(request: AnyRequest) -> AnyResponse:
        return await completions.respond(request, parse_messages, MessagesEncoder)

    @post("/v1/messages/count_tokens", status_code=200)
    async def count_tokens(request: AnyRequest) -> dict[str, Any]:
        return {"input_tokens": await count(request, parse_count, MessagesEncoder)}

    return [responses, input_tokens, stored, dropped, messages, count_tokens]
