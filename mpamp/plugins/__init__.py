"""Plugins: what they may implement (``hookspecs``) and how they are found (``manager``)."""
