"""The load tester: a client that knows neither engine nor server, in front of any OpenAI API."""
