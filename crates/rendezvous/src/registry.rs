//! Registry operations without HTTP: register, connect, validate, list, revoke.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use exec_server_relay::EndReason;
use exec_server_relay::keys::{Fingerprint, PublicKey, SECURITY_PROFILE};
use exec_server_relay::registry::{
    ConnectRequest, ConnectResponse, RegisterRequest, RegisterResponse, ValidateRequest,
    ValidateResponse,
};
use exec_server_sync::RwLock;
use exec_server_transport::journal;
use serde::{Deserialize, Serialize};

use crate::oidc::{self, Oidc};
use crate::router::{
    AttachError, DisconnectTarget, ExecutorIdentity, HarnessIdentity, NodeStatus, Router,
};
use crate::signature::{SocketTicket, TicketHolder, UrlSigner};
use crate::store::{ExecutorRegistration, Revocation, Store, StoreError};
use crate::tenants::{self, QuotaError, Tenants};
use crate::tokens::{AuthenticatedCaller, TokenRole, Tokens};

/// Maximum length of an environment id in bytes.
const MAX_ID_BYTES: usize = 128;

/// Maximum length of a machine's display name in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Whether an environment may have this id. Ids are inserted into URLs without escaping.
pub fn is_environment_id(id: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(allowed) && !id.starts_with('.')
}

/// Error response to a registry request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegistryCallError {
    pub(crate) status: u16,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    /// How long to wait before another try, if waiting helps.
    pub(crate) retry: Option<Duration>,
}

impl RegistryCallError {
    pub(crate) fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            retry: None,
        }
    }
}

impl From<QuotaError> for RegistryCallError {
    fn from(error: QuotaError) -> Self {
        // If waiting does not help, the request is forbidden rather than limited.
        let status = if error.retry.is_some() { 429 } else { 403 };
        Self {
            retry: error.retry,
            ..Self::new(status, "quota_exceeded", error.to_string())
        }
    }
}

impl From<StoreError> for RegistryCallError {
    fn from(error: StoreError) -> Self {
        // Details of a store failure go to the operator's log only.
        tracing::error!(%error, "the store failed");
        Self::new(
            503,
            "store_unavailable",
            "the registry cannot reach its store",
        )
    }
}

impl From<AttachError> for RegistryCallError {
    fn from(error: AttachError) -> Self {
        let (status, code) = match error {
            AttachError::Offline => (409, "environment_offline"),
            AttachError::TooManySockets(_) => (429, "too_many_sockets"),
            AttachError::Unavailable(_) => (503, "route_unavailable"),
        };
        Self::new(status, code, error.to_string())
    }
}

/// Registry of executors, with authorization of executors and harnesses.
#[derive(Debug)]
pub(crate) struct ExecutorRegistry {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) router: Arc<dyn Router>,
    pub(crate) signer: UrlSigner,
    tokens: RwLock<Arc<Tokens>>,
    /// Issuer of tokens that are not in the token file.
    pub(crate) oidc: Option<Arc<Oidc>>,
    pub(crate) tenants: Tenants,
    /// Held from counting a tenant's environments to adding one.
    counting: tokio::sync::Mutex<()>,
    /// Lifetime of an executor's signed websocket URL.
    executor_lifetime: Duration,
    /// Lifetime of a harness's signed websocket URL and authorization.
    harness_lifetime: Duration,
}

/// One environment in a list.
#[derive(Debug, Serialize)]
pub(crate) struct ListedEnvironment {
    environment_id: String,
    tenant: String,
    executor_registration_id: String,
    executor_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    owner: String,
    registered_at: u64,
    online: bool,
    /// The node to which the executor is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    harnesses: usize,
    streams: usize,
}

/// One stream in a list.
#[derive(Debug, Serialize)]
pub(crate) struct ListedStream {
    stream_id: String,
    environment_id: String,
    tenant: String,
    token: String,
    key: String,
    executor_node: String,
    harness_node: String,
}

/// One revocation in a list.
#[derive(Debug, Serialize)]
pub(crate) struct ListedRevocation {
    environment: Option<String>,
    harness: String,
    tenant: String,
    revoked_at: u64,
}

/// Request to revoke a harness or to undo the revocation.
#[derive(Debug, Deserialize)]
pub(crate) struct RevokeRequest {
    /// `token:NAME`, `key:SHA256`, or the name of a token.
    #[serde(default)]
    harness: Option<String>,
    /// The harness's public keys, as an alternative to `harness`.
    #[serde(default)]
    harness_public_key: Option<PublicKey>,
    /// The environment; all environments if absent.
    #[serde(default)]
    environment_id: Option<String>,
    /// Tenant of the harness; the caller's tenant if absent.
    #[serde(default)]
    tenant: Option<String>,
}

/// Subject of a revocation.
struct RevocationTarget {
    tenant: String,
    /// Name of the harness within its tenant.
    harness: String,
    /// Name of the harness in stores; see [`tenants::scoped`].
    harness_key: String,
    environment_key: Option<String>,
}

impl RevokeRequest {
    fn harness(&self) -> Result<String, RegistryCallError> {
        let invalid = |message: &str| RegistryCallError::new(400, "invalid_request", message);
        match (&self.harness, &self.harness_public_key) {
            (None, Some(key)) => Ok(format!("key:{}", key.fingerprint())),
            (Some(text), None) => match text.split_once(':') {
                Some(("key", key)) => key
                    .parse::<Fingerprint>()
                    .map(|key| format!("key:{key}"))
                    .map_err(|error| invalid(&error.to_string())),
                Some(("token", name)) if crate::tokens::is_name(name) || oidc::is_subject(name) => {
                    Ok(text.clone())
                }
                _ if crate::tokens::is_name(text) || oidc::is_subject(text) => {
                    Ok(format!("token:{text}"))
                }
                _ => Err(invalid(
                    "`harness` is `token:NAME`, `key:SHA256` or the name of a token or subject",
                )),
            },
            _ => Err(invalid(
                "one of `harness` and `harness_public_key` is expected",
            )),
        }
    }

    fn target(&self, caller: &AuthenticatedCaller) -> Result<RevocationTarget, RegistryCallError> {
        let tenant = administered_tenant(caller, self.tenant.as_deref())?;
        let harness = self.harness()?;
        let environment = self.environment_id.as_deref().map(checked_id).transpose()?;
        Ok(RevocationTarget {
            harness_key: tenants::scoped(&tenant, &harness),
            environment_key: environment.map(|id| tenants::scoped(&tenant, &id)),
            tenant,
            harness,
        })
    }
}

/// Checks that a caller is admin of a tenant (its own if `None`) and returns the tenant.
fn administered_tenant(
    caller: &AuthenticatedCaller,
    tenant: Option<&str>,
) -> Result<String, RegistryCallError> {
    let tenant = tenant.unwrap_or(&caller.tenant);
    if !caller.is(TokenRole::Admin) {
        let message = format!("the token `{}` is not one of an admin", caller.name);
        return Err(RegistryCallError::new(403, "wrong_role", message));
    }
    // Checked before the tenant's name, so that the response does not reveal whether the tenant
    // exists.
    if !caller.is_admin_of(tenant) {
        let message = format!(
            "the token `{}` is not for the tenant `{tenant}`",
            caller.name
        );
        return Err(RegistryCallError::new(403, "wrong_tenant", message));
    }
    if !tenants::is_tenant(tenant) {
        let message = format!("`{tenant}` is not a valid tenant name");
        return Err(RegistryCallError::new(400, "invalid_request", message));
    }
    Ok(tenant.to_owned())
}

/// An environment of the caller's tenant.
struct CallerEnvironment {
    id: String,
    /// Name of the environment in stores and routers; see [`tenants::scoped`].
    key: String,
}

fn checked_id(id: &str) -> Result<String, RegistryCallError> {
    if is_environment_id(id) {
        return Ok(id.to_owned());
    }
    Err(RegistryCallError::new(
        400,
        "invalid_environment_id",
        format!(
            "an environment id is 1 to {MAX_ID_BYTES} letters, digits, `-`, `_`, `~` and `.`, and \
             does not begin with a dot"
        ),
    ))
}

impl ExecutorRegistry {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        router: Arc<dyn Router>,
        signer: UrlSigner,
        tokens: Tokens,
        oidc: Option<Arc<Oidc>>,
        tenants: Tenants,
        (executor_lifetime, harness_lifetime): (Duration, Duration),
    ) -> Self {
        Self {
            store,
            router,
            signer,
            tokens: RwLock::new(Arc::new(tokens)),
            oidc,
            tenants,
            counting: tokio::sync::Mutex::default(),
            executor_lifetime,
            harness_lifetime,
        }
    }

    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        Arc::clone(&self.tokens.read())
    }

    /// Replaces the tokens and disconnects harnesses whose token was removed. Returns the number of
    /// sockets.
    pub(crate) fn set_tokens(&self, tokens: Tokens) -> usize {
        *self.tokens.write() = Arc::new(tokens);
        self.router.retain_harnesses(
            &|who| self.still_allows(&who.token, TokenRole::Harness, &who.environment),
            EndReason::AuthorizationRevoked,
        )
    }

    /// Computes this node's shares of the tenants' rate quotas.
    pub(crate) fn update_quota_shares(&self) {
        let router = &self.router;
        let used = self
            .tenants
            .update_quota_shares(|tenant| router.rates_elsewhere(tenant));
        router.report_rates(used);
    }

    /// Whether a token that was accepted earlier is still valid for a role and an environment;
    /// `environment` includes the tenant.
    pub(crate) fn still_allows(&self, name: &str, role: TokenRole, environment: &str) -> bool {
        if oidc::is_subject(name) {
            // Tickets and authorizations of an OIDC subject expire with its token.
            return self.oidc.is_some();
        }
        self.tokens().still_allows(name, role, environment)
    }

    /// Whether a caller was revoked in its whole tenant. All its requests are refused, so it cannot
    /// undo the revocation.
    pub(crate) async fn is_caller_revoked(
        &self,
        caller: &AuthenticatedCaller,
    ) -> Result<bool, StoreError> {
        // The empty id belongs to no environment, so only revocations for all environments are found.
        let no_environment = tenants::scoped(&caller.tenant, "");
        self.is_token_revoked(&no_environment, &caller.name).await
    }

    /// Refuses to revoke or permit an operator unless the caller is an operator. Operators make
    /// requests in the default tenant, but admins of that tenant may not revoke them.
    fn check_revocation_target(
        &self,
        caller: &AuthenticatedCaller,
        target: &RevocationTarget,
    ) -> Result<(), RegistryCallError> {
        let operator = target
            .harness
            .strip_prefix("token:")
            .is_some_and(|name| self.tokens().is_operator(name));
        if operator {
            self.require_operator(caller)?;
        }
        Ok(())
    }

    fn permit(
        caller: &AuthenticatedCaller,
        role: TokenRole,
        environment: &str,
    ) -> Result<CallerEnvironment, RegistryCallError> {
        let environment = checked_id(environment)?;
        if !caller.is(role) {
            let message = format!("the token `{}` has no role {role}", caller.name);
            return Err(RegistryCallError::new(403, "wrong_role", message));
        }
        if !caller.may_use(&environment) {
            let message = format!("the token `{}` is not for `{environment}`", caller.name);
            return Err(RegistryCallError::new(403, "wrong_environment", message));
        }
        Ok(CallerEnvironment {
            key: tenants::scoped(&caller.tenant, &environment),
            id: environment,
        })
    }

    /// `POST …/register`; `address` builds a URL from a path and its query.
    pub(crate) async fn register(
        &self,
        caller: &AuthenticatedCaller,
        environment: &str,
        request: RegisterRequest,
        address: &(dyn Fn(&str, &str) -> String + Sync),
    ) -> Result<RegisterResponse, RegistryCallError> {
        let CallerEnvironment { id, key } = Self::permit(caller, TokenRole::Executor, environment)?;
        if request.security_profile != SECURITY_PROFILE {
            let message = format!("`security_profile` must be `{SECURITY_PROFILE}`");
            return Err(RegistryCallError::new(
                400,
                "unknown_security_profile",
                message,
            ));
        }
        let name = request.name.filter(|name| !name.trim().is_empty());
        if name
            .as_ref()
            .is_some_and(|name| name.len() > MAX_NAME_BYTES)
        {
            let message = format!("`name` is longer than {MAX_NAME_BYTES} bytes");
            return Err(RegistryCallError::new(400, "invalid_request", message));
        }
        if self.is_token_revoked(&key, &caller.name).await? {
            let message = format!("the token `{}` was revoked for `{id}`", caller.name);
            return Err(RegistryCallError::new(403, "executor_revoked", message));
        }
        let usage = self.tenants.usage(&caller.tenant);
        let registration = loop {
            let before = self.store.registration(&key).await?;
            if let Some(before) = &before
                && *before.owner != *caller.name
            {
                let message = format!("`{id}` belongs to another token");
                return Err(RegistryCallError::new(403, "environment_taken", message));
            }
            let _counting = if before.is_none() && usage.quota().environments.is_some() {
                let counting = self.counting.lock().await;
                usage.one_more_environment(self.store.environments(&caller.tenant).await?)?;
                Some(counting)
            } else {
                None
            };
            let same = before
                .as_ref()
                .is_some_and(|before| before.executor == request.executor_public_key);
            // The same executor registers again: its registration stays valid for it and its
            // harnesses.
            if let Some(before) = &before
                && same
                && before.name == name
            {
                break before.registration.clone();
            }
            let fresh = match &before {
                Some(before) if same => before.registration.clone(),
                _ => uuid::Uuid::new_v4().to_string(),
            };
            let registration = ExecutorRegistration {
                environment: key.clone(),
                registration: fresh.clone(),
                executor: request.executor_public_key.clone(),
                name: name.clone(),
                owner: caller.name.to_string(),
                registered_at: journal::now(),
            };
            let replaces = before.map(|before| before.registration);
            if self.store.register(registration, replaces).await? {
                break fresh;
            }
            // Another request changed the registration in the meantime; try again.
        };
        let others = DisconnectTarget::ExecutorExcept {
            environment: key.clone(),
            registration: registration.clone(),
        };
        let disconnected = self
            .router
            .disconnect(others, EndReason::ExecutorDetached)
            .await;
        if disconnected > 0 {
            tracing::warn!(
                environment = key,
                "another executor has replaced the one that was attached"
            );
        }
        let ticket = SocketTicket {
            environment: key,
            registration: registration.clone(),
            holder: TicketHolder::Executor,
            expires: caller.until(self.store.unix_now(), self.executor_lifetime.as_secs()),
            token_expires: caller.expires(),
        };
        Ok(RegisterResponse {
            url: address(&id, &self.signer.query(&ticket)),
            urls: Vec::new(),
            registries: Vec::new(),
            environment_id: id,
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_registration_id: registration,
            // A token or an environment that was removed may be added again.
            retry_refusals: true,
        })
    }

    /// `POST …/connect`.
    pub(crate) async fn connect(
        &self,
        caller: &AuthenticatedCaller,
        environment: &str,
        request: &ConnectRequest,
        address: &(dyn Fn(&str, &str) -> String + Sync),
    ) -> Result<ConnectResponse, RegistryCallError> {
        let spot = Self::permit(caller, TokenRole::Harness, environment)?;
        let (id, environment) = (spot.id, spot.key);
        let key = request.harness_public_key.fingerprint();
        if self.is_revoked(&environment, &caller.name, &key).await? {
            let message = format!("the harness was revoked for `{id}`");
            return Err(RegistryCallError::new(403, "harness_revoked", message));
        }
        let offline = || {
            let message = format!("no executor of `{id}` is attached");
            RegistryCallError::new(409, "environment_offline", message)
        };
        // The response does not reveal whether the environment was ever registered.
        if self.store.registration(&environment).await?.is_none() {
            return Err(offline());
        }
        let attached = self.router.attached(&environment).await?;
        let attached = attached.ok_or_else(offline)?;
        let registration = self.store.registration(&environment).await?;
        let registration = registration
            .filter(|registration| *registration.registration == *attached)
            .ok_or_else(offline)?;
        let elsewhere = self.router.streams_elsewhere(&caller.tenant);
        self.tenants.usage(&caller.tenant).may_connect(elsewhere)?;
        let expires = caller.until(self.store.unix_now(), self.harness_lifetime.as_secs());
        let authorization = self.signer.authorize(
            &environment,
            &attached,
            &request.harness_public_key,
            &caller.name,
            expires,
        );
        let authorization = authorization.ok_or_else(|| {
            RegistryCallError::new(500, "internal", "the authorization is too long")
        })?;
        let ticket = SocketTicket {
            environment,
            registration: registration.registration.clone(),
            holder: TicketHolder::Harness {
                token: caller.name.to_string(),
                key,
            },
            expires,
            token_expires: caller.expires(),
        };
        Ok(ConnectResponse {
            url: address(&id, &self.signer.query(&ticket)),
            urls: Vec::new(),
            registries: Vec::new(),
            environment_id: id,
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_registration_id: registration.registration,
            executor_public_key: registration.executor,
            harness_key_authorization: authorization,
        })
    }

    /// `POST …/validate`. Also returns the token of the harness for the audit log.
    pub(crate) async fn validate(
        &self,
        caller: &AuthenticatedCaller,
        environment: &str,
        request: &ValidateRequest,
    ) -> Result<(ValidateResponse, Option<String>), RegistryCallError> {
        let environment = Self::permit(caller, TokenRole::Executor, environment)?.key;
        let refused = Ok((ValidateResponse { valid: false }, None));
        let registered = self.store.registration(&environment).await?;
        let known = registered.is_some_and(|registered| {
            registered.registration == request.executor_registration_id
                && *registered.owner == *caller.name
        });
        if !known || self.is_token_revoked(&environment, &caller.name).await? {
            return refused;
        }
        let token = self.signer.authorized(
            &environment,
            &request.executor_registration_id,
            &request.harness_public_key,
            &request.harness_key_authorization,
            self.store.unix_now(),
        );
        let Some(token) = token else {
            return refused;
        };
        let key = request.harness_public_key.fingerprint();
        let valid = self.still_allows(&token, TokenRole::Harness, &environment)
            && !self.is_revoked(&environment, &token, &key).await?;
        Ok((ValidateResponse { valid }, Some(token)))
    }

    async fn is_revoked(
        &self,
        environment: &str,
        token: &str,
        key: &Fingerprint,
    ) -> Result<bool, StoreError> {
        let (tenant, _) = tenants::split(environment);
        let names = [format!("token:{token}"), format!("key:{key}")];
        let names = names.map(|name| tenants::scoped(tenant, &name));
        self.store.is_revoked(environment, names).await
    }

    async fn is_token_revoked(&self, environment: &str, token: &str) -> Result<bool, StoreError> {
        let (tenant, _) = tenants::split(environment);
        let name = tenants::scoped(tenant, &format!("token:{token}"));
        self.store
            .is_revoked(environment, [name.clone(), name])
            .await
    }

    /// Checks that a signed websocket URL is still valid, and returns the identity of its holder.
    pub(crate) async fn admit(&self, ticket: SocketTicket) -> Result<AdmittedPeer, AdmitError> {
        let registered = self.store.registration(&ticket.environment).await;
        let registered = registered.map_err(|_| AdmitError::Unavailable)?;
        let registered = registered.ok_or(AdmitError::Route("unknown_route"))?;
        if registered.registration != ticket.registration {
            return Err(AdmitError::Route("unexpected_executor_registration_id"));
        }
        let environment: Arc<str> = ticket.environment.as_str().into();
        let registration: Arc<str> = ticket.registration.as_str().into();
        match ticket.holder {
            TicketHolder::Executor => {
                let revoked = self.is_token_revoked(&environment, &registered.owner).await;
                let allowed =
                    self.still_allows(&registered.owner, TokenRole::Executor, &environment);
                if revoked.map_err(|_| AdmitError::Unavailable)? || !allowed {
                    return Err(AdmitError::Route("unknown_route"));
                }
                Ok(AdmittedPeer::Executor(ExecutorIdentity {
                    environment,
                    registration,
                }))
            }
            TicketHolder::Harness { token, key } => {
                let revoked = self.is_revoked(&environment, &token, &key).await;
                let allowed = self.still_allows(&token, TokenRole::Harness, &environment);
                if revoked.map_err(|_| AdmitError::Unavailable)? || !allowed {
                    return Err(AdmitError::Route("unknown_route"));
                }
                Ok(AdmittedPeer::Harness(HarnessIdentity {
                    environment,
                    registration,
                    token: token.into(),
                    key,
                }))
            }
        }
    }

    /// Lists the environments that a caller may see.
    pub(crate) async fn list(
        &self,
        caller: &AuthenticatedCaller,
    ) -> Result<Vec<ListedEnvironment>, RegistryCallError> {
        let attached = self.router.environments().await;
        let attached: HashMap<_, _> = attached
            .iter()
            .map(|attachment| (attachment.environment.as_str(), attachment))
            .collect();
        let mut listed = Vec::new();
        for registration in self.store.registrations().await? {
            let (tenant, id) = tenants::split(&registration.environment);
            let concerns = *tenant == *caller.tenant && {
                let own = *registration.owner == *caller.name;
                own || (caller.is(TokenRole::Harness) && caller.may_use(id))
            };
            if !concerns && !caller.is_admin_of(tenant) {
                continue;
            }
            let (tenant, id) = (tenant.to_owned(), id.to_owned());
            let attachment = attached.get(registration.environment.as_str());
            listed.push(ListedEnvironment {
                executor_key: registration.executor.fingerprint().to_string(),
                environment_id: id,
                tenant,
                executor_registration_id: registration.registration,
                name: registration.name,
                owner: registration.owner,
                registered_at: registration.registered_at,
                online: attachment.is_some(),
                node: attachment.map(|attachment| attachment.node.clone()),
                harnesses: attachment.map_or(0, |attachment| attachment.harnesses),
                streams: attachment.map_or(0, |attachment| attachment.streams),
            });
        }
        Ok(listed)
    }

    /// Checks that a caller is an operator of the rendezvous server.
    pub(crate) fn require_operator(
        &self,
        caller: &AuthenticatedCaller,
    ) -> Result<(), RegistryCallError> {
        if caller.is_operator() {
            return Ok(());
        }
        let message = match caller.is(TokenRole::Admin) {
            true => format!(
                "the token `{}` administers the tenant `{}` only; this request needs an admin with \
                 `tenant=*`",
                caller.name, caller.tenant
            ),
            false => format!("the token `{}` is not one of an admin", caller.name),
        };
        Err(RegistryCallError::new(403, "wrong_role", message))
    }

    /// Lists the nodes of the cluster, this one first.
    pub(crate) async fn nodes(
        &self,
        caller: &AuthenticatedCaller,
    ) -> Result<Vec<NodeStatus>, RegistryCallError> {
        self.require_operator(caller)?;
        Ok(self.router.nodes().await)
    }

    /// Checks that a caller may drain a node.
    pub(crate) async fn check_drain(
        &self,
        caller: &AuthenticatedCaller,
        node: &str,
    ) -> Result<(), RegistryCallError> {
        let nodes = self.nodes(caller).await?;
        if nodes.iter().any(|there| there.name == node) {
            return Ok(());
        }
        let message = format!("unknown node `{node}`");
        Err(RegistryCallError::new(404, "unknown_node", message))
    }

    /// Lists the streams of the tenants that an admin administers, of one tenant, or of one
    /// environment.
    pub(crate) async fn streams(
        &self,
        caller: &AuthenticatedCaller,
        tenant: Option<&str>,
        environment: Option<&str>,
    ) -> Result<Vec<ListedStream>, RegistryCallError> {
        let own = administered_tenant(caller, tenant)?;
        let environment = environment.map(checked_id).transpose()?;
        let environment = environment.map(|id| tenants::scoped(&own, &id));
        let streams = self.router.streams(environment.as_deref()).await;
        let listed = streams.into_iter().filter_map(|stream| {
            let (whose, id) = tenants::split(&stream.environment);
            let matches_tenant = tenant.is_none_or(|tenant| tenant == whose);
            (matches_tenant && caller.is_admin_of(whose)).then(|| ListedStream {
                environment_id: id.to_owned(),
                tenant: whose.to_owned(),
                stream_id: stream.stream,
                token: stream.token,
                key: stream.key,
                executor_node: stream.executor_node,
                harness_node: stream.harness_node,
            })
        });
        Ok(listed.collect())
    }

    /// Removes an environment and disconnects all its sockets. Returns its tenant.
    pub(crate) async fn remove(
        &self,
        caller: &AuthenticatedCaller,
        tenant: Option<&str>,
        environment: &str,
    ) -> Result<String, RegistryCallError> {
        let id = checked_id(environment)?;
        let tenant = match tenant {
            Some(_) => administered_tenant(caller, tenant)?,
            None => caller.tenant.to_string(),
        };
        let environment = tenants::scoped(&tenant, &id);
        let unknown = || {
            let message = format!("unknown environment `{id}`");
            RegistryCallError::new(404, "unknown_environment", message)
        };
        let there = self.store.registration(&environment).await?;
        let own = there.is_some_and(|there| *there.owner == *caller.name);
        let may = caller.is_admin_of(&tenant) || (own && caller.is(TokenRole::Executor));
        if !may {
            let message = "only an admin or the token that registered an environment can remove it";
            return Err(RegistryCallError::new(403, "wrong_role", message));
        }
        if !self.store.remove(&environment).await? {
            return Err(unknown());
        }
        let target = DisconnectTarget::Environment(environment);
        self.router.disconnect(target, EndReason::Closed).await;
        Ok(tenant)
    }

    /// Revokes a harness in one environment or in its whole tenant, and disconnects it. If the
    /// token belongs to an executor, disconnects its environments too. Returns the harness, its
    /// tenant and the number of sockets.
    pub(crate) async fn revoke(
        &self,
        caller: &AuthenticatedCaller,
        request: &RevokeRequest,
    ) -> Result<(String, String, usize), RegistryCallError> {
        let revoked = request.target(caller)?;
        self.check_revocation_target(caller, &revoked)?;
        let revocation = Revocation {
            environment: revoked.environment_key.clone(),
            harness: revoked.harness_key.clone(),
            revoked_at: journal::now(),
        };
        // Stored first, so that a harness that reconnects immediately is refused.
        self.store.revoke(revocation).await?;
        let target = DisconnectTarget::Harness {
            environment: revoked.environment_key.clone(),
            harness: revoked.harness_key,
        };
        let reason = EndReason::AuthorizationRevoked;
        let mut ended = self.router.disconnect(target, reason.clone()).await;
        if let Some(token) = revoked.harness.strip_prefix("token:") {
            for registration in self.store.registrations().await? {
                let environment = registration.environment;
                let here = match &revoked.environment_key {
                    Some(only) => *only == environment,
                    None => tenants::split(&environment).0 == revoked.tenant,
                };
                if here && registration.owner == token {
                    let target = DisconnectTarget::Environment(environment);
                    ended += self.router.disconnect(target, reason.clone()).await;
                }
            }
        }
        Ok((revoked.harness, revoked.tenant, ended))
    }

    /// Undoes a revocation. Returns the harness, its tenant, and whether it was revoked.
    pub(crate) async fn undo_revocation(
        &self,
        caller: &AuthenticatedCaller,
        request: &RevokeRequest,
    ) -> Result<(String, String, bool), RegistryCallError> {
        let revoked = request.target(caller)?;
        self.check_revocation_target(caller, &revoked)?;
        let permitted = self
            .store
            .permit(revoked.environment_key, revoked.harness_key)
            .await?;
        Ok((revoked.harness, revoked.tenant, permitted))
    }

    /// Lists the revocations of the tenants that an admin administers.
    pub(crate) async fn revocations(
        &self,
        caller: &AuthenticatedCaller,
    ) -> Result<Vec<ListedRevocation>, RegistryCallError> {
        administered_tenant(caller, None)?;
        let revocations = self.store.revocations().await?;
        let shown = revocations.into_iter().filter_map(|revocation| {
            let (tenant, harness) = tenants::split(&revocation.harness);
            caller.is_admin_of(tenant).then(|| ListedRevocation {
                environment: revocation
                    .environment
                    .as_ref()
                    .map(|environment| tenants::split(environment).1.to_owned()),
                harness: harness.to_owned(),
                tenant: tenant.to_owned(),
                revoked_at: revocation.revoked_at,
            })
        });
        Ok(shown.collect())
    }
}

/// Identity of the peer that opens a socket.
#[derive(Debug)]
pub(crate) enum AdmittedPeer {
    Executor(ExecutorIdentity),
    Harness(HarnessIdentity),
}

/// Why a socket with a signed URL is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdmitError {
    /// The URL is no longer valid; the text is sent to the peer.
    Route(&'static str),
    /// The store cannot be reached.
    Unavailable,
    /// The router refused the socket.
    Attach(AttachError),
}
