//! Authorization of a request by the scopes of its connection's token.
//!
//! The scopes that each method requires are in its row of [`table`](exec_server_protocol::table).

use exec_server_protocol::Scope;

use crate::ApiError;
use crate::auth::{ClientIdentity, Scopes};

/// Refuses a request of the method `name` unless the identity has one of these scopes, or the list
/// is empty.
pub(crate) fn check(
    identity: &ClientIdentity,
    name: &str,
    scopes: &[Scope],
) -> Result<(), ApiError> {
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
