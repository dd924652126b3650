"""The tables of NACL and CRaC on ACDC."""
