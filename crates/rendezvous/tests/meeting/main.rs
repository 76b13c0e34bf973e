//! A meeting point in this process, and peers that speak its wire, well or badly.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod attacks;
mod events;
mod flow;
mod oidc;
mod registry;
mod streams;
mod support;
mod tenants;
