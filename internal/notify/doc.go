// Package notify makes the notifiers of the stock relay: webhook, email, dingtalk and chat.
//
// Properties:
//   - A target comes from configuration only. Nothing in a task chooses it.
//   - No redirect, no proxy; time, and what is read of an answer, have a limit.
//   - Secrets and addresses with tokens are in no log line and no error.
//   - A notifier that returns nil has an answer that says the other side has taken the notice. The caller keeps the
//     notice otherwise, and tries again.
package notify

import (
	"github.com/rs/zerolog"

	"github.com/taskrelay/taskrelay/internal/config"
	"github.com/taskrelay/taskrelay/pkg/outbox"
)

// New makes the notifiers that are configured. The notifier log is the relay's own.
func New(cfg config.Notify, log zerolog.Logger) (map[string]outbox.Notifier, error) {
	all := map[string]outbox.Notifier{}
	add := func(name, variable string, n outbox.Notifier, err error) error {
		if err != nil {
			return config.Invalid(variable, "notifier %s: %w", name, err)
		}
		all[name] = n
		return nil
	}
	if cfg.NotifyWebhookURL != "" {
		n, err := Webhook(string(cfg.NotifyWebhookURL), string(cfg.NotifyWebhookSecret))
		if err := add("webhook", "NOTIFY_WEBHOOK_URL", n, err); err != nil {
			return nil, err
		}
	}
	if cfg.NotifySmtpURL != "" {
		n, err := Email{
			URL: string(cfg.NotifySmtpURL), From: cfg.NotifyEmailFrom, To: cfg.NotifyEmailTo, Logger: log,
		}.Notifier()
		if err := add("email", "NOTIFY_SMTP_URL", n, err); err != nil {
			return nil, err
		}
	}
	if cfg.NotifyDingtalkURL != "" {
		n, err := DingTalk(string(cfg.NotifyDingtalkURL), string(cfg.NotifyDingtalkSecret))
		if err := add("dingtalk", "NOTIFY_DINGTALK_URL", n, err); err != nil {
			return nil, err
		}
	}
	if cfg.NotifyChatURL != "" {
		n, err := Chat(string(cfg.NotifyChatURL), cfg.NotifyChatTemplate)
		if err := add("chat", "NOTIFY_CHAT_TEMPLATE", n, err); err != nil {
			return nil, err
		}
	}
	return all, nil
}
