"""Sockets and connections, before there is a request.

::

    listener.py             what the server listens on; handover.py: a port for a successor; ports.py: which paths where
    connection.py           time limits of one connection; request_parser.py, tls.py
    open_connections.py     what all of them together may take
"""
