//! The check of a request against the scopes of the token that its connection came with.
//!
//! Which scopes a method needs is its row in [`table`](exec_server_protocol::table).

use exec_server_protocol::Scope;

use crate::ApiError;
use crate::auth::{Identity, Scopes};

/// Refuses a request of the method `name` unless the identity has one of these scopes, or none is
/// needed.
pub(crate) fn check(identity: &Identity, name: &str, scopes: &[Scope]) -> Result<(), ApiError> {
    if identity.scopes == Scopes::ALL
        || scopes.is_empty()
        || scopes.iter().any(|&scope| identity.scopes.contains(scope))
    {
        return Ok(());
    }
    let names: Vec<_> = scopes.iter().map(|scope| format!("`{scope}`")).collect();
    Err(ApiError::invalid_request(format!(
        "`{name}` needs the scope {}, which this token does not have",
        names.join(" or ")
    )))
}
