//! A meeting point in this process, and peers that speak its wire, well or badly.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod attacks;
mod flow;
mod registry;
mod streams;
mod support;
