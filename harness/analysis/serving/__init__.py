"""What users of the server felt: latencies, rates, and interference by prefills."""
