"""Server processes from start to end, and questions to servers. Nothing here knows a vendor's stack."""
