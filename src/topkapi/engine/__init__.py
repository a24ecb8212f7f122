"""Generation over a DSA model: requests in, text out, batched and streamed as they come."""
