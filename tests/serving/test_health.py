"""Whether a server says truly how it is."""

import httpx


def test_a_server_whose_engine_has_answered_a_token_is_ready_and_says_so_everywhere(
    client: httpx.Client,
) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    for path in ("/health", "/health/ready"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ready"
        assert answer.json()["num_steps"] >= 1
