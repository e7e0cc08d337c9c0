"""The gateway: an HTTP face before the engines, whose sessions become trajectories."""

from asyncrl.gateway.gateway import Gateway, GatewayStatistics
from asyncrl.gateway.http import Answer, Refused, Request, Route, Routes, json_answer
from asyncrl.gateway.record import Record
from asyncrl.gateway.server import HTTPServer
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import ForeignSampling, GatewaySettings, ToolFormat

__all__ = [
    "Answer",
    "ForeignSampling",
    "Gateway",
    "GatewaySettings",
    "GatewayStatistics",
    "HTTPServer",
    "Record",
    "Refused",
    "Request",
    "Route",
    "Routes",
    "Session",
    "ToolFormat",
    "json_answer",
]
